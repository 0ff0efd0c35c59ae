"""Digits-like classification; every epoch a dict of metrics is averaged over the ranks and logged by rank 0."""
import argparse
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def reduce_dict(metrics):
    """mean over the ranks of every entry"""
    out = OrderedDict()
    for name in metrics:
        value = torch.tensor(float(metrics[name]))
        dist.all_reduce(value)
        out[name] = value.item() / dist.get_world_size()
    return out


class Tracker:
    def __init__(self, rank):
        self.rank, self.metrics = rank, OrderedDict()
        if rank == 0:  # rank 0 announces the best value so far at the start
            self.metrics["accuracy"] = 0.0
            self.metrics["loss"] = 0.0

    def update(self, **values):
        self.metrics.update(values)


def patterns(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(6, 25, generator=torch.Generator().manual_seed(99))
    y = torch.randint(6, (n,), generator=g)
    return TensorDataset(proto[y] + 1.2 * torch.randn(n, 25, generator=g), y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=16)
    cfg = p.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(25, 40), nn.GELU(), nn.Linear(40, 6)))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    train, valid = patterns(320, 1), patterns(96, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, cfg.batch, sampler=sampler)
    vloader = DataLoader(valid, 24, sampler=DistributedSampler(valid, shuffle=False))
    tracker = Tracker(rank)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        model.eval()
        losses, hits = [], []
        with torch.no_grad():
            for x, y in vloader:
                out = model(x)
                losses.append(nn.functional.cross_entropy(out, y).item())
                hits.append((out.argmax(1) == y).float().mean().item())
        tracker.update(loss=sum(losses) / len(losses), accuracy=sum(hits) / len(hits))
        shared = reduce_dict(tracker.metrics)
        if rank == 0:
            print(f"epoch {epoch} " + " ".join(f"{k} {v:.4f}" for k, v in shared.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
