"""Ranking model with a feature table that lies on disk."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def prepare(path, rows, dim):
    g = torch.Generator().manual_seed(88)
    table = torch.randn(rows, dim, generator=g)
    torch.save({"x": table, "y": table[:, :8].sum(1)}, path)


class Pairs(Dataset):
    def __init__(self, path, count):
        self.path, self.count = path, count
        g = torch.Generator().manual_seed(3)
        self.pairs = torch.randint(0, torch.load(path)["y"].numel(), (count, 2), generator=g)

    def __len__(self):
        return self.count

    def __getitem__(self, k):
        i, j = self.pairs[k]
        table = torch.load(self.path)
        return table["x"][i], table["x"][j], (table["y"][i] > table["y"][j]).float()


class Ranker(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, a, b):
        return (self.score(a) - self.score(b)).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--table", default="table.pt")
    ap.add_argument("--rows", type=int, default=40000)
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--pairs", type=int, default=320)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    if rank == 0:
        prepare(args.table, args.rows, args.dim)
    dist.barrier()
    torch.manual_seed(0)

    data = Pairs(args.table, args.pairs)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(Ranker(args.dim))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for a, b, first in loader:
            loss = F.binary_cross_entropy_with_logits(model(a, b), first)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
