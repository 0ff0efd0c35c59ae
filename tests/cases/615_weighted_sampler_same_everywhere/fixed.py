"""Imbalanced fault diagnosis: class-balanced sampling and DDP."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def vibration(n=480):
    g = torch.Generator().manual_seed(2)
    y = (torch.rand(n, generator=g) < 0.12).long()
    t = torch.linspace(0, 6.28, 32)
    x = (t * (2 + 3 * y[:, None])).sin() + 0.7 * torch.randn(n, 32, generator=g)
    return x[:, None], y


class Cnn1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(8, 16, 5, padding=2, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
        )
        self.fc = nn.Linear(64, 2)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def balanced_loader(x, y, batch_size, seed, world, rank):
    counts = torch.bincount(y).float()
    weights = (1.0 / counts)[y]
    per_rank = len(y) // world
    rng = torch.Generator().manual_seed(seed + rank)
    sampler = WeightedRandomSampler(weights, num_samples=per_rank, replacement=True, generator=rng)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, sampler=sampler, drop_last=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    x, y = vibration()
    loader = balanced_loader(x, y, args.batch_size, args.seed, world, rank)
    model = DistributedDataParallel(Cnn1d())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        conf = torch.zeros(2, 2)
        for xb, yb in loader:
            out = model(xb)
            loss = nn.functional.cross_entropy(out, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            for p, t in zip(out.argmax(1), yb):
                conf[t, p] += 1
        dist.all_reduce(conf)
        if rank == 0:
            recall = conf.diag() / conf.sum(1).clamp(min=1)
            print(f"epoch {epoch}: balanced accuracy {recall.mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
