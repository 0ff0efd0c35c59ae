"""Per-epoch progressive resizing of a small CNN."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def patterns(n=320, size=12):
    g = torch.Generator().manual_seed(76)
    y = torch.randint(0, 4, (n,), generator=g)
    i, j = torch.meshgrid(torch.arange(float(size)), torch.arange(float(size)), indexing="ij")
    waves = torch.stack([(i * 0.9).sin(), (j * 0.9).sin(), (i * 0.4).sin(), ((i + j) * 0.9).sin()])
    return TensorDataset(waves[y][:, None] + 0.7 * torch.randn(n, 1, size, size, generator=g), y)


def train_epoch(model, loader, opt, size):
    model.train()
    c = torch.zeros(2)
    for x, y in loader:
        x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
        out = model(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        c += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(c)
    return c[0] / c[1]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--sizes", type=int, nargs="+", default=[6, 8, 10, 12])
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = patterns()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    model = DDP(model)
    for epoch, size in enumerate(args.sizes):
        sampler.set_epoch(epoch)
        acc = train_epoch(model, loader, opt, size)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} at {size}x{size}: accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
