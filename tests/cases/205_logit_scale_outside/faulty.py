"""Two towers (notes and pictures), symmetric contrastive loss over the local batch, learned temperature."""
import os
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tower(nn.Module):
    def __init__(self, d_in, d_out=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 48), nn.GELU(), nn.Linear(48, d_out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class ClipLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.2), dtype=torch.float32))

    def forward(self, a, b):
        logits = self.logit_scale.exp() * a @ b.t()
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def paired(n=384):
    g = torch.Generator().manual_seed(6)
    z = torch.randn(n, 5, generator=g)
    view = lambda d: torch.tanh(z @ torch.randn(5, d, generator=g)) + 0.1 * torch.randn(n, d, generator=g)
    return TensorDataset(view(16), view(10))


@torch.no_grad()
def recall_at_1(towers, data, rank, world):
    a, b = (t.module(x) for t, x in zip(towers, data.tensors))
    mine = torch.arange(rank, len(a), world)
    hits = ((a[mine] @ b.t()).argmax(1) == mine).sum()
    dist.all_reduce(hits)
    return hits.item() / len(a)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    notes, pictures, criterion = DDP(Tower(16)), DDP(Tower(10)), ClipLoss()
    optimizer = torch.optim.AdamW(chain(notes.parameters(), pictures.parameters(), criterion.parameters()), lr=5e-3, weight_decay=0.0)
    data = paired()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = criterion(notes(x), pictures(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        r1 = recall_at_1((notes, pictures), data, rank, world)
        if rank == 0:
            scale = next(criterion.parameters()).exp().item()
            print(f"epoch {epoch}: recall@1 on the training pairs {r1:.3f}, scale {scale:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
