"""Classifier with a live accuracy that covers all processes and all batches so far."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LiveAccuracy:
    def __init__(self):
        self.counts = torch.zeros(2)

    def add(self, logits, y):
        self.counts += torch.tensor([(logits.argmax(1) == y).sum().item(), len(y)])

    def everywhere(self):
        seen = self.counts.clone()
        dist.all_reduce(seen)
        return (seen[0] / seen[1]).item(), int(seen[1])


def spirals(n=384):
    g = torch.Generator().manual_seed(77)
    y = torch.randint(0, 2, (n,), generator=g)
    r = 0.3 + 2 * torch.rand(n, generator=g)
    a = 2 * r + 3.1416 * y
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g), y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--report-every", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    data = spirals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        live = LiveAccuracy()
        for step, (x, y) in enumerate(loader, 1):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            live.add(logits, y)
            if step % args.report_every == 0:
                acc, n = live.everywhere()
                if rank == 0:
                    print(f"epoch {epoch} step {step}: {acc:.3f} of {n}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
