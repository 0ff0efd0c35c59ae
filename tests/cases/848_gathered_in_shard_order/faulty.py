"""Distributed prediction of a test set, scored on rank 0."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def triangles(n, seed):
    g = torch.Generator().manual_seed(seed)
    sides = 1 + torch.rand(n, 3, generator=g)
    return TensorDataset(sides, sides.argmax(1))


@torch.no_grad()
def predict(net, data, world):
    """Class of every sample of the dataset, on all ranks."""
    net.eval()
    sampler = DistributedSampler(data, shuffle=False)
    mine = torch.cat([net(x).argmax(1) for x, _ in DataLoader(data, batch_size=25, sampler=sampler)])
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    net.train()
    return torch.cat(parts)[: len(data)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_set, test_set = triangles(320, 1), triangles(150, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        pred = predict(net, test_set, world)
        if rank == 0:
            acc = (pred == test_set.tensors[1]).float().mean().item()
            print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
