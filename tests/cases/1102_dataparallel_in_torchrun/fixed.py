"""Small image classifier, started with torchrun."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def stripes(n, seed):
    """Images with horizontal, vertical or diagonal stripes."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 3, (n,), generator=g)
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    yy, xx = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
    wave = torch.stack([yy, xx, (xx + yy) / 1.4])[kind]
    images = torch.sin(1.4 * wave + phase) + 0.6 * torch.randn(n, 10, 10, generator=g)
    return TensorDataset(images.unsqueeze(1), kind)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(x.amax(dim=(2, 3)))


def train_one_epoch(model, loader, optimizer):
    model.train()
    total = torch.zeros(2)
    for images, target in loader:
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(target), len(target)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def setup():
    dist.init_process_group("gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    rank, world = setup()
    torch.manual_seed(1234)

    model = Net()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    train_set = stripes(320, 7)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "stripes.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
