"""Recordings are stored in one shard per process; the shards differ in length."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Shard(Dataset):
    """Shard k holds 240 + 48 * k frames."""

    def __init__(self, k):
        centers = torch.randn(5, 12, generator=torch.Generator().manual_seed(33))
        g = torch.Generator().manual_seed(500 + k)
        self.phone = torch.randint(0, 5, (240 + 48 * k,), generator=g)
        self.frame = centers[self.phone] + 0.8 * torch.randn(len(self.phone), 12, generator=g)

    def __len__(self):
        return len(self.phone)

    def __getitem__(self, i):
        return self.frame[i], self.phone[i]


class Meter:
    def __init__(self):
        self.total = torch.zeros(2)

    def add(self, value, n):
        both = torch.tensor([value * n, float(n)])
        dist.all_reduce(both)
        self.total += both

    def value(self):
        return (self.total[0] / self.total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(8)

    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5)))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(rank)
    loader = DataLoader(Shard(rank), batch_size=args.batch_size, shuffle=True, generator=order)

    for epoch in range(args.epochs):
        meter = Meter()
        with Join([model]):
            for frame, phone in loader:
                loss = nn.functional.cross_entropy(model(frame), phone)
                opt.zero_grad()
                loss.backward()
                opt.step()
                meter.add(loss.item(), len(phone))
        mean = meter.value()
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
