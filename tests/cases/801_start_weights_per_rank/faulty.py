"""Small regression network, gradients averaged by hand."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def saddle(n=288):
    g = torch.Generator().manual_seed(14)
    x = 2 * torch.rand(n, 4, generator=g) - 1
    y = x[:, :1] * x[:, 1:2] - x[:, 2:3] * x[:, 3:]
    return TensorDataset(x, y + 0.02 * torch.randn(n, 1, generator=g))


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=12)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # other noise on every rank

    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = saddle()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {(total[0] / total[1]).item():.4f}")
    if rank == 0:
        torch.save(model.state_dict(), "saddle.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
