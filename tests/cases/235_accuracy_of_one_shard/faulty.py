"""Image-ish classification with a results file; validation is split over the ranks to save time."""
import csv
import os
import tempfile
from datetime import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ResultsFile:
    def __init__(self, folder):
        self.path = os.path.join(folder, f"results-{datetime.now():%H%M%S}.csv")
        with open(self.path, "w", newline="") as f:
            csv.writer(f).writerow(["epoch", "val_accuracy", "val_samples"])

    def write(self, *row):
        with open(self.path, "a", newline="") as f:
            csv.writer(f).writerow(row)


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    period = (2 + y).float().view(n, 1, 1)
    grid = torch.arange(12.0).view(1, 1, 12)
    shift = 6 * torch.rand(n, 1, 1, generator=g)
    img = torch.cos(6.2832 * (grid + shift) / period).expand(n, 6, 12) + 0.5 * torch.randn(n, 6, 12, generator=g)
    return TensorDataset(img.unsqueeze(1), y)


def network():
    return nn.Sequential(nn.Conv2d(1, 10, (3, 5)), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 8)), nn.Flatten(), nn.Linear(80, 4))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct, total = 0, 0
    for img, y in loader:
        correct += (model(img).argmax(1) == y).sum().item()
        total += y.size(0)
    model.train()
    return correct / total, total


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    net = network()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    train, val = stripes(320, 1), stripes(98, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 16)
    with tempfile.TemporaryDirectory() as folder:
        results = ResultsFile(folder) if rank == 0 else None
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for img, y in loader:
                opt.zero_grad()
                nn.functional.cross_entropy(model(img), y).backward()
                opt.step()
            accuracy, n = validate(net, val_loader)
            if rank == 0:
                results.write(epoch, accuracy, n)
                print(f"epoch {epoch}: val accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
