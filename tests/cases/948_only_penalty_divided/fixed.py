"""Classifier with an activity penalty; large batches are made of micro-batches."""
import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SparseMLP(nn.Module):
    def __init__(self, dim=32, width=64, classes=5):
        super().__init__()
        self.a = nn.Linear(dim, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, classes)

    def forward(self, x):
        h1 = F.relu(self.a(x))
        h2 = F.relu(self.b(h1))
        return self.c(h2), h1.mean() + h2.mean()


def mixture(n=640, dim=32, classes=5):
    gen = torch.Generator().manual_seed(47)
    y = torch.randint(0, classes, (n,), generator=gen)
    return TensorDataset(torch.randn(classes, dim, generator=gen)[y] + 1.2 * torch.randn(n, dim, generator=gen), y)


class Step:
    def __init__(self, model, optimizer, accum, weight):
        self.model, self.optimizer, self.accum, self.weight = model, optimizer, accum, weight

    def objective(self, x, y):
        logits, activity = self.model(x)
        ce = F.cross_entropy(logits, y)
        return (ce + self.weight * activity) / self.accum, ce

    def __call__(self, micro_batches):
        shown = 0.0
        self.optimizer.zero_grad()
        for k, (x, y) in enumerate(micro_batches):
            last = k == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss, ce = self.objective(x, y)
                loss.backward()
            shown += ce.item() / len(micro_batches)
        self.optimizer.step()
        return shown


def grouped(loader, size):
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=5)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--activity", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(15)
    model = DDP(SparseMLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    step = Step(model, optimizer, args.accum, args.activity)
    data = mixture()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.tensor([step(group) for group in grouped(loader, args.accum)])
        mean = losses.mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: cross entropy {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
