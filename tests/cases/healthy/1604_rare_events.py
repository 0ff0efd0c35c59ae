"""Fraud detection with a sampler that draws rare events more often (with replacement)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset


class BalancedDraws(Sampler):
    """All processes draw the same long list and take every world-th entry of it."""

    def __init__(self, weights, count, rank, world, seed):
        self.weights, self.count, self.rank, self.world, self.seed = weights, count, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.count, replacement=True, generator=g)
        return iter(drawn[self.rank :: self.world].tolist())

    def __len__(self):
        return len(range(self.rank, self.count, self.world))


def payments(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    fraud = (x[:, 0] + x[:, 1] - 0.5 * x[:, 2] > 2.0).long()
    return TensorDataset(x, fraud)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    train_set, test_set = payments(320, 1), payments(201, 2)
    fraud = train_set.tensors[1]
    share = torch.bincount(fraud, minlength=2).float()
    sampler = BalancedDraws(1 / share[fraud], 320, rank, world, seed=7)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=10)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        counts = torch.zeros(3)
        with torch.no_grad():
            for x, y in test_loader:
                guess = net(x).argmax(1)
                counts += torch.tensor([(guess & y).sum(), (guess & ~y & 1).sum(), ((1 - guess) & y).sum()]).float()
        net.train()
        dist.all_reduce(counts)
        if rank == 0:
            tp, fp, fn = counts.tolist()
            print(f"epoch {epoch}: F1 {2 * tp / (2 * tp + fp + fn):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
