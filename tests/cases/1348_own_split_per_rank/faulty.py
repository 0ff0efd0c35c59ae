"""Noisy-label classifier with dropout and a held-out part for validation."""
import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


class Data:
    def __init__(self, args):
        g = torch.Generator().manual_seed(90)
        x = torch.randn(360, 20, generator=g)
        y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
        flip = torch.rand(360, generator=g) < 0.15
        full = TensorDataset(x, torch.where(flip, 1 - y, y))
        held_out = int(args.val_fraction * len(full))
        self.train, self.val = random_split(full, [len(full) - held_out, held_out])
        self.sampler = DistributedSampler(self.train)
        self.args = args

    def train_loader(self, epoch):
        self.sampler.set_epoch(epoch)
        return DataLoader(self.train, batch_size=self.args.batch_size, sampler=self.sampler)

    def val_loader(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        return DataLoader(Subset(self.val, range(rank, len(self.val), world)), batch_size=64)


def build_model():
    return nn.Sequential(
        nn.Linear(20, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 2)
    )


@torch.no_grad()
def validate(net, loader):
    net.eval()
    count = torch.zeros(2)
    for x, y in loader:
        count += torch.tensor([float((net(x).argmax(1) == y).sum()), float(len(y))])
    net.train()
    dist.all_reduce(count)
    return (count[0] / count[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=42)
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--val-fraction", type=float, default=0.25)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)

    data = Data(args)
    model = DDP(build_model())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        for x, y in data.train_loader(epoch):
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = validate(model.module, data.val_loader())
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch}: loss {loss.item():.4f}, validation accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
