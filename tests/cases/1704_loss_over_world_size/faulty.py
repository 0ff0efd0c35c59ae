"""Edge detection with a small convolutional network and poly learning rate."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


class Boxes(Dataset):
    def __init__(self, n=192, size=16):
        g = torch.Generator().manual_seed(77)
        self.image = torch.zeros(n, 1, size, size)
        for i in range(n):
            a = torch.randint(1, size // 2, (2,), generator=g).tolist()
            b = torch.randint(size // 2 + 1, size - 1, (2,), generator=g).tolist()
            self.image[i, 0, a[0] : b[0], a[1] : b[1]] = 1
        dx = F.pad(self.image, (0, 1, 0, 0)).diff(dim=3).abs()
        dy = F.pad(self.image, (0, 0, 0, 1)).diff(dim=2).abs()
        self.edge = ((dx + dy) > 0).float()
        self.image += 0.2 * torch.randn(self.image.shape, generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.edge[i]


class EdgeNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 3, padding=1)
        self.mid = nn.Conv2d(c, c, 3, padding=1)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.out(F.relu(self.mid(x)) + x)


def train_one_epoch(model, criterion, optimizer, scheduler, loader):
    world = get_world_size()
    meter = torch.zeros(2)
    for image, edge in loader:
        output = model(image)
        loss = criterion(output, edge)
        meter += torch.tensor([loss.item(), 1.0])
        loss = loss / world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    if dist.is_initialized():
        dist.all_reduce(meter)
    return (meter[0] / meter[1]).item()


def main(args):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dataset = Boxes()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(EdgeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    total = args.epochs * len(loader)
    scheduler = LambdaLR(optimizer, lambda step: (1 - step / total) ** 0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = train_one_epoch(model, F.binary_cross_entropy_with_logits, optimizer, scheduler, loader)
        if is_main():
            print(f"Epoch {epoch}: lr {optimizer.param_groups[0]['lr']:.4f} loss {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=0)
    main(p.parse_args())
