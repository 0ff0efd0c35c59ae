"""Small image classifier in the style of older DDP tutorials."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--out", default="runs")


class Stripes(Dataset):
    """Horizontal, vertical or diagonal stripes with noise."""

    def __init__(self, n=288, size=10):
        self.n = n
        g = torch.Generator().manual_seed(17)
        self.phase = 6.28 * torch.rand(n, generator=g)
        self.noise = 0.5 * torch.randn(n, 1, size, size, generator=g)
        self.a = torch.arange(size).float()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        kind = i % 3
        u, v = self.a[:, None], self.a[None, :]
        wave = [u + 0 * v, v + 0 * u, u + v][kind]
        return torch.sin(1.3 * wave + self.phase[i])[None] + self.noise[i], kind


def build():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    world_size = dist.get_world_size()
    device = torch.device("cuda", args.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = build().to(device)
    model = DDP(model, device_ids=[args.local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    train_set = Stripes()
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=args.local_rank)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if args.local_rank == 0:
            print(f"[{epoch}] loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(args.out, "stripes.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
