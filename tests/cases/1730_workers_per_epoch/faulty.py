"""Keyword spotting on synthetic tones, loaded by worker processes."""
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Tones(Dataset):
    def __init__(self, n=128, classes=6):
        g = torch.Generator().manual_seed(44)
        self.label = torch.randint(0, classes, (n,), generator=g)
        self.noise_seed = torch.randint(0, 2**31, (n,), generator=g)
        self.bank = None

    def open_bank(self):
        t = torch.arange(4000) / 4000
        rows = [sum(torch.sin(6.283 * (220 * (k + 1) * h + d) * t) / h for h in range(1, 16) for d in range(6)) for k in range(6)]
        self.bank = torch.stack(rows)[:, ::40]
        self.bank /= self.bank.std(dim=1, keepdim=True)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        if self.bank is None:
            self.open_bank()
        g = torch.Generator().manual_seed(int(self.noise_seed[i]))
        return self.bank[self.label[i]] + 0.7 * torch.randn(100, generator=g), self.label[i]


def build_loader(args):
    data = Tones()
    sampler = DistributedSampler(data)
    return sampler, DataLoader(data, batch_size=16, sampler=sampler, num_workers=args.workers)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 6)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler, loader = build_loader(args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start = time.time()
        for tone, label in loader:
            loss = nn.functional.cross_entropy(model(tone), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {time.time() - start:.2f} s, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
