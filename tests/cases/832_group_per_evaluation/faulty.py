"""Metric reduction over its own process group."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def xyz(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > x[:, 2]).long())


@torch.no_grad()
def evaluate(net, data, rank, world):
    metrics = dist.new_group(backend="gloo")
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    out = net(x)
    counts = torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y))]).double()
    dist.all_reduce(counts, group=metrics)
    net.train()
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--eval-every", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    train_set, val_set = xyz(320, 1), xyz(100, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % args.eval_every == 0:
                best = max(best, evaluate(net, val_set, rank, world))
        if rank == 0:
            print(f"epoch {epoch}: best accuracy so far {best:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
