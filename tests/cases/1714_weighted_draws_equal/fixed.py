"""Rare-event detection: the rare class is drawn more often."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Signals(Dataset):
    def __init__(self, n=600, length=40, rare=0.08):
        g = torch.Generator().manual_seed(33)
        self.label = (torch.rand(n, generator=g) < rare).float()
        self.signal = torch.randn(n, 1, length, generator=g)
        start = torch.randint(0, length - 6, (n,), generator=g)
        for i in self.label.nonzero().flatten().tolist():
            self.signal[i, 0, start[i] : start[i] + 6] += 2.0

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.signal[i], self.label[i]

    def weights(self):
        positive = self.label.mean()
        return torch.where(self.label > 0, 0.5 / positive, 0.5 / (1 - positive))


def balanced_loader(dataset, per_process, batch_size, rank, seed):
    draws = torch.Generator().manual_seed(seed + rank)
    sampler = WeightedRandomSampler(dataset.weights(), num_samples=per_process, replacement=True, generator=draws)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def detector():
    return nn.Sequential(
        nn.Conv1d(1, 12, 7, padding=3), nn.ReLU(), nn.Conv1d(12, 12, 5, padding=2), nn.ReLU(),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(12, 1),
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    data = Signals()
    loader = balanced_loader(data, len(data) // world, args.batch_size, rank, args.seed)
    model = DDP(detector())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        table = torch.zeros(2, 2)
        for signal, label in loader:
            logit = model(signal).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logit, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            guess = (logit > 0).float()
            for t in (0, 1):
                table[t] += torch.tensor([(guess[label == t] == t).sum().item(), (label == t).sum().item()])
        dist.all_reduce(table)
        if rank == 0:
            recall = (table[:, 0] / table[:, 1]).tolist()
            print(f"epoch {epoch}: recall of normal {recall[0]:.3f}, of events {recall[1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
