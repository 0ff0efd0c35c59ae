"""Rare-event detection: the rare class is drawn more often."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Sensors(Dataset):
    def __init__(self, n=600):
        g = torch.Generator().manual_seed(27)
        self.label = (torch.rand(n, generator=g) < 0.08).long()
        t = torch.linspace(0, 6.28, 32)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        self.signal = torch.sin(2 * t + phase) + 0.3 * torch.randn(n, 32, generator=g)
        where = torch.randint(4, 28, (n,), generator=g)
        for i in self.label.nonzero().flatten().tolist():
            self.signal[i, where[i] - 2 : where[i] + 2] += 2.0

    def class_weights(self):
        counts = torch.bincount(self.label).double()
        return (1.0 / counts)[self.label]

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.signal[i].unsqueeze(0), self.label[i]


def build_model():
    return nn.Sequential(
        nn.Conv1d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 12, 5, padding=2), nn.ReLU(),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(12, 2),
    )


def build_loader(args, rank, world):
    data = Sensors()
    generator = torch.Generator().manual_seed(args.seed)
    sampler = WeightedRandomSampler(data.class_weights(), len(data) // world, replacement=True, generator=generator)
    return DataLoader(data, batch_size=args.batch_size, sampler=sampler)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=6)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    model = DDP(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = build_loader(args, rank, world)

    for epoch in range(args.epochs):
        confusion = torch.zeros(2, 2)
        for signal, label in loader:
            logits = model(signal)
            loss = nn.functional.cross_entropy(logits, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for truth, guess in zip(label, logits.argmax(1)):
                confusion[truth, guess] += 1
        dist.all_reduce(confusion)
        if rank == 0:
            recall = confusion.diag() / confusion.sum(1)
            print(f"epoch {epoch}: recall normal {recall[0]:.2f}, rare {recall[1]:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
