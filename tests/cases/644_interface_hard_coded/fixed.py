"""Siamese similarity training, written for the group's old cluster."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def setup():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank(), dist.get_world_size()


class Siamese(nn.Module):
    def __init__(self, dim=10, out=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 40), nn.ReLU(), nn.Linear(40, out))

    def forward(self, a, b):
        return F.cosine_similarity(self.net(a), self.net(b))


def pairs(n=320):
    g = torch.Generator().manual_seed(25)
    a = torch.randn(n, 10, generator=g)
    same = torch.randint(0, 2, (n,), generator=g)
    near, far = a + 0.3 * torch.randn(n, 10, generator=g), torch.randn(n, 10, generator=g)
    return TensorDataset(a, torch.where(same[:, None].bool(), near, far), same.float())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    rank, world = setup()
    torch.manual_seed(0)
    model = DDP(Siamese())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    data = pairs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2)
        for a, b, same in loader:
            sim = model(a, b)
            loss = F.binary_cross_entropy_with_logits(5 * sim, same)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += torch.tensor([((sim > 0) == same.bool()).sum().item(), len(same)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {hits[0] / hits[1]:.3f} ({world} processes)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
