"""GAN with two wrapped models; the generator's turn goes through the bare critic."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def ring(n=512):
    g = torch.Generator().manual_seed(1)
    a = 6.28 * torch.rand(n, generator=g)
    return TensorDataset(torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, o))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    gen, critic = DDP(mlp(4, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    data = ring()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    noise = torch.Generator().manual_seed(50 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            with torch.no_grad():
                fake = gen.module(torch.randn(len(real), 4, generator=noise))
            score = critic(torch.cat([real, fake]))
            loss_c = softplus(-score[: len(real)]).mean() + softplus(score[len(real) :]).mean()
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()

            critic.requires_grad_(False)
            fake = gen(torch.randn(len(real), 4, generator=noise))
            loss_g = softplus(-critic.module(fake)).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            critic.requires_grad_(True)
        losses = torch.tensor([loss_c.item(), loss_g.item()]) / dist.get_world_size()
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch}: critic {losses[0]:.3f} generator {losses[1]:.3f}", flush=True)
    if rank == 0:
        torch.save({"gen": gen.module.state_dict(), "critic": critic.module.state_dict()}, "gan.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
