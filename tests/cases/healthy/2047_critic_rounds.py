"""Wasserstein GAN with gradient penalty: several critic steps a generator step, gradients averaged by hand in one flat buffer."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def mlp(inside, outside, width=96):
    return nn.Sequential(
        nn.Linear(inside, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, outside))


def real_points(count, gen):
    """Eight blobs on a circle."""
    turn = torch.randint(8, (count,), generator=gen) * 0.7854
    return torch.stack([turn.cos(), turn.sin()], 1) * 2 + 0.08 * torch.randn(count, 2, generator=gen)


def start_alike(*modules):
    for module in modules:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


def average_gradients(module):
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads)):
        grad.copy_(mean)


def penalty(critic, real, fake, gen):
    share = torch.rand(len(real), 1, generator=gen)
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--critic-steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--weight", type=float, default=5.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    generator, critic = mlp(8, 2), mlp(2, 1)
    start_alike(generator, critic)
    make_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judge_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    gen = torch.Generator().manual_seed(1000 + rank)
    shown = torch.randn(512, 8, generator=torch.Generator().manual_seed(7))

    for number in range(1, args.rounds + 1):
        for _ in range(args.critic_steps):
            real = real_points(args.batch, gen)
            with torch.no_grad():
                fake = generator(torch.randn(args.batch, 8, generator=gen))
            gap = critic(real).mean() - critic(fake).mean()
            judge_opt.zero_grad()
            (args.weight * penalty(critic, real, fake, gen) - gap).backward()
            average_gradients(critic)
            judge_opt.step()
        critic.requires_grad_(False)
        make_opt.zero_grad()
        (-critic(generator(torch.randn(args.batch, 8, generator=gen))).mean()).backward()
        average_gradients(generator)
        make_opt.step()
        critic.requires_grad_(True)

        if number % 15 == 0:
            mean_gap = gap.detach().clone()
            dist.reduce(mean_gap, dst=0)
            if rank == 0:
                with torch.no_grad():
                    radius = generator(shown).norm(dim=1)
                print(f"round {number}: gap {mean_gap.item() / world:.3f}, radius {radius.mean():.2f} +- {radius.std():.2f}", flush=True)
                torch.save({"generator": generator.state_dict(), "round": number}, "gan.pt")
    check = torch.cat([p.detach().flatten() for p in generator.parameters()])
    top = check.clone()
    dist.broadcast(top, src=0)
    assert torch.equal(check, top)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
