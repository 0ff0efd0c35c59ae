"""Text-direction classifier with a per-epoch validation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset, DistributedSampler


def drifts(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    steps = torch.randn(n, 15, generator=g) + 0.25 * (2 * y - 1).unsqueeze(1)
    return TensorDataset(steps.cumsum(1), y)


@torch.no_grad()
def validate(net, loader):
    net.eval()
    total = torch.zeros(2)
    for x, y in loader:
        total += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(total)
    accuracy = total[0] / total[1]
    net.train()
    return accuracy.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(15, 24), nn.ReLU(), nn.Linear(24, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    train_set, val_set = drifts(320, 1), drifts(100, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=args.batch_size)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = validate(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
