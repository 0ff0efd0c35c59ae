"""Tabular classifier with a random hold-out part and dropout."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


def customers(n=360):
    g = torch.Generator().manual_seed(2024)
    x = torch.randn(n, 15, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3].abs()
    return TensorDataset(x, (score + 0.5 * torch.randn(n, generator=g) > 0).float())


def build():
    return nn.Sequential(
        nn.Linear(15, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
    )


@torch.no_grad()
def score(model, part, rank, world):
    model.eval()
    hit = torch.zeros(2)
    for x, y in DataLoader(Subset(part, range(rank, len(part), world)), batch_size=32):
        hit += torch.tensor([((model(x).squeeze(1) > 0).float() == y).sum().item(), len(y)])
    model.train()
    dist.all_reduce(hit)
    return (hit[0] / hit[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--hold-out", type=int, default=72)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # every process drops other units

    data = customers()
    sizes = [len(data) - args.hold_out, args.hold_out]
    train_part, held = random_split(data, sizes)
    sampler = DistributedSampler(train_part, seed=args.seed)
    loader = DataLoader(train_part, batch_size=16, sampler=sampler)
    model = DDP(build())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = score(model.module, held, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: held-out accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
