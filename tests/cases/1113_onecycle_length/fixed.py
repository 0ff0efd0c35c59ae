"""Digit-like glyphs with a one-cycle learning rate."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Glyphs(Dataset):
    """Seven-segment digits with noise."""

    SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]

    def __init__(self, n=640):
        g = torch.Generator().manual_seed(50)
        self.label = torch.randint(0, 10, (n,), generator=g)
        table = torch.tensor([[float(c) for c in s] for s in self.SEGMENTS])
        mix = torch.randn(7, 30, generator=g)
        self.image = table[self.label] @ mix + 0.7 * torch.randn(n, 30, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.image[i], self.label[i]


def fit(args, rank, world):
    data = Glyphs()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.max_lr, momentum=0.9)
    steps_per_epoch = len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.max_lr, total_steps=args.epochs * steps_per_epoch, pct_start=0.3
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2)
        for image, label in loader:
            out = model(image)
            loss = nn.functional.cross_entropy(out, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            hits += torch.tensor([(out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(hits)
        if rank == 0:
            lr = scheduler.get_last_lr()[0]
            print(f"epoch {epoch}: accuracy {(hits[0] / hits[1]).item():.3f}, lr {lr:.5f}", flush=True)
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--max-lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11)
    model = fit(args, rank, world)
    if rank == 0:
        torch.save(model.module.state_dict(), "glyphs.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
