"""Glyph classifier with three ranks and a running accuracy meter."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Glyphs(Dataset):
    shapes = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1, 0, 1, 0], [1, 0, 1, 0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 1, 0, 0, 1, 0]]).float()

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = self.shapes[self.y].view(n, 1, 3, 3).repeat_interleave(3, 2).repeat_interleave(3, 3)
        self.x = self.x + 0.9 * torch.randn(n, 1, 9, 9, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(108, 4)
    )


def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            hit = (model(x).argmax(1) == y).sum()
            counts += torch.stack([hit.float(), torch.tensor(float(len(y)))])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = Glyphs(360, 1), Glyphs(144, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, 12, sampler=DistributedSampler(test, shuffle=False))
    model = DistributedDataParallel(make_net())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test accuracy {100 * acc:.1f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
