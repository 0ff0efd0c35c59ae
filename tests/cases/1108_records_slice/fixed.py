"""Matrix factorisation of a table of ratings."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def read_ratings(users=40, items=30, n=800):
    g = torch.Generator().manual_seed(19)
    p, q = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    pairs = torch.randperm(users * items, generator=g)[:n]
    u, i = pairs // items, pairs % items
    stars = (p[u] * q[i]).sum(1) + 0.1 * torch.randn(n, generator=g)
    return list(zip(u.tolist(), i.tolist(), stars.tolist()))


class Ratings(Dataset):
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, k):
        u, i, stars = self.records[k]
        return torch.tensor(u), torch.tensor(i), torch.tensor(stars)


class Factors(nn.Module):
    def __init__(self, users=40, items=30, dim=6):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(1)
        return dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


def make_loader(args, rank, world):
    records = read_ratings()
    data = Ratings(records)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    return DataLoader(data, batch_size=args.batch_size, sampler=sampler), sampler


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=2e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(Factors())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader, sampler = make_loader(args, rank, world)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for u, i, stars in loader:
            err = (model(u, i) - stars).pow(2)
            opt.zero_grad()
            err.mean().backward()
            opt.step()
            total += torch.tensor([err.sum().item(), len(err)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: rmse {(total[0] / total[1]).sqrt().item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
