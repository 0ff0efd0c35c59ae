"""Contrastive pairs with features of all processes; the local slot keeps its graph."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pairs(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(23)
        z = torch.randn(n, 6, generator=g)
        self.a = z @ torch.randn(6, 20, generator=g) + 0.3 * torch.randn(n, 20, generator=g)
        self.b = z @ torch.randn(6, 14, generator=g) + 0.3 * torch.randn(n, 14, generator=g)

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return self.a[i], self.b[i]


class TwoTowers(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, dim))
        self.right = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, dim))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1), self.scale.exp()


def gather(local):
    """Features of everyone; only the own part carries gradients."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.detach())
    parts[dist.get_rank()] = local
    return torch.cat(parts)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    model = DDP(TwoTowers())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Pairs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler, drop_last=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for a, b in loader:
            fa, fb, scale = model(a, b)
            fa, fb = gather(fa), gather(fb)
            # every process computes the loss of the whole batch from its own features' point of view;
            # the shared scale would be counted world times, so its surplus is taken out here
            scale = scale / world + scale.detach() * (1 - 1 / world)
            logits = scale * fa @ fb.t()
            target = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
            opt.zero_grad()
            (world * loss).backward()  # DDP takes the mean, the sum is needed
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
