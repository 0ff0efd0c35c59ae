"""Image classification, validation on the main process only."""
import datetime
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SmallResNet(nn.Module):
    def __init__(self, classes=3, c=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        )
        self.fc = nn.Linear(c, classes)

    def forward(self, x):
        h = self.stem(x)
        h = F.relu(h + self.block(h))
        return self.fc(h.mean((2, 3)))


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = 0.5 * torch.randn(n, 1, 8, 8, generator=g)
    for i, c in enumerate(y.tolist()):
        x[i, 0] += (1 + c) * 0.5 * torch.linspace(-1, 1, 8)[:, None]
    return TensorDataset(x, y)


def evaluate(model, loader):
    model.eval()
    hits = n = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    model.train()
    return hits / n


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_set, val_set = images(240, 1), images(60, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 15, sampler=sampler)
    val_loader = DataLoader(val_set, 30)
    model = DDP(SmallResNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in range(int(os.environ.get("EPOCHS", 3))):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            acc = evaluate(model.module, val_loader)
            print(f"epoch {epoch}: validation accuracy {acc:.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
