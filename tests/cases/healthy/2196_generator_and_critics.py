"""MD-GAN: rank 0 trains one generator, the other ranks keep their data and train a critic each."""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
from torch import nn

LATENT, DATA = 8, 2


def make_generator():
    return nn.Sequential(nn.Linear(LATENT, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, DATA))


def make_critic():
    return nn.Sequential(nn.Linear(DATA, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))


def real_points(n, gen, modes):
    angle = 2 * torch.pi * modes[torch.randint(len(modes), (n,), generator=gen)] / 6
    return 2 * torch.stack([angle.cos(), angle.sin()], -1) + 0.15 * torch.randn(n, DATA, generator=gen)


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def run_generator(args, critics):
    net = make_generator()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9))
    noise = torch.Generator().manual_seed(5)
    reference = real_points(512, torch.Generator().manual_seed(6), torch.arange(6))
    for step in range(1, args.steps + 1):
        for _ in range(args.critic_steps - 1):  # batches for the critics only
            for critic in critics:
                with torch.no_grad():
                    dist.send(net(torch.randn(args.batch, LATENT, generator=noise)), dst=critic)
        fakes, feedback = [], []
        for critic in critics:
            fake = net(torch.randn(args.batch, LATENT, generator=noise))
            dist.send(fake.detach(), dst=critic)
            fakes.append(fake)
        for critic, fake in zip(critics, fakes):
            grad = torch.empty_like(fake)
            dist.recv(grad, src=critic)
            feedback.append(grad / len(critics))
        optimizer.zero_grad()
        torch.autograd.backward(fakes, feedback)
        optimizer.step()
        if step % args.log_every == 0:
            with torch.no_grad():
                sample = net(torch.randn(512, LATENT, generator=noise))
            print(f"step {step}: energy distance {energy_distance(sample, reference):.4f}", flush=True)
    torch.save(net.state_dict(), "generator.pt")


def run_critic(args, rank):
    net = make_critic()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9))
    draw = torch.Generator().manual_seed(50 + rank)
    modes = torch.arange(6)
    fake = torch.empty(args.batch, DATA)
    for step in range(1, args.steps + 1):
        for _ in range(args.critic_steps):
            dist.recv(fake, src=0)
            real = real_points(args.batch, draw, modes)
            loss = torch.relu(1 - net(real)).mean() + torch.relu(1 + net(fake)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # the last batch is also the one the generator waits for
        probe = fake.clone().requires_grad_(True)
        (grad,) = torch.autograd.grad(-net(probe).mean(), probe)
        dist.send(grad, dst=0)
        if step % args.log_every == 0:
            print(f"  critic {rank} step {step}: hinge {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--critic-steps", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=80)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    if rank == 0:
        run_generator(args, critics=range(1, dist.get_world_size()))
    else:
        run_critic(args, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
