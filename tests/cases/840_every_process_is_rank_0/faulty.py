"""Colour classification with an explicit rank option."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dist-url", default="env://")
    ap.add_argument("--rank", type=int, default=0)
    ap.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    return ap.parse_args()


def colours(n=288):
    g = torch.Generator().manual_seed(98)
    rgb = torch.rand(n, 3, generator=g)
    return TensorDataset(rgb, rgb.argmax(1) + 3 * (rgb.sum(1) > 1.5).long())


def main():
    args = options()
    dist.init_process_group(
        "gloo", init_method=args.dist_url, rank=args.rank, world_size=args.world_size
    )
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 6)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = colours()
    sampler = DistributedSampler(data, num_replicas=args.world_size, rank=args.rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2)
        for rgb, y in loader:
            out = model(rgb)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        if args.rank == 0:
            print(f"epoch {epoch}: accuracy {(hits[0] / hits[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
