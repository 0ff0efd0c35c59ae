"""Multi-label tagging, gradients exchanged over a slow network."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def tags(n=256):
    g = torch.Generator().manual_seed(29)
    x = torch.randn(n, 20, generator=g)
    rules = torch.randn(20, 6, generator=g)
    return TensorDataset(x, (x @ rules > 1.0).float())


@torch.no_grad()
def average(tensors):
    for t in tensors:
        dist.all_reduce(t, op=dist.ReduceOp.SUM)
        t /= dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--sync-every", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 6))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    data = tags()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if (step + 1) % args.sync_every == 0:
                average(p.data for p in net.parameters())
            step += 1
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
