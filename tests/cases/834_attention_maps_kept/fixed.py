"""Single-layer attention model for sorting-like lookups."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def lookups(n=512, length=24):
    g = torch.Generator().manual_seed(36)
    key = torch.stack([torch.randperm(length, generator=g) for _ in range(n)])
    value = torch.randint(0, 8, (n, length), generator=g)
    query = torch.randint(0, length, (n,), generator=g)
    where = (key == query[:, None]).float().argmax(1)
    return TensorDataset(key, value, query, value[torch.arange(n), where])


class Lookup(nn.Module):
    def __init__(self, length=24, values=8, dim=96):
        super().__init__()
        self.key = nn.Embedding(length, dim)
        self.value = nn.Embedding(values, dim)
        self.query = nn.Embedding(length, dim)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, values))
        self.maps = []

    def forward(self, key, value, query):
        score = torch.einsum("bd,bld->bl", self.query(query), self.key(key)) / self.key.embedding_dim**0.5
        attention = score.softmax(1)
        self.maps = [attention.detach()]
        return self.out(torch.einsum("bl,bld->bd", attention, self.value(value)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Lookup())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = lookups()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for key, value, query, answer in loader:
            loss = nn.functional.cross_entropy(model(key, value, query), answer)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            sharp = model.module.maps[-1].max(1).values.mean().item()
            print(f"epoch {epoch}: loss {loss.item():.4f}, sharpness {sharp:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
