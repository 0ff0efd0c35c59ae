"""SimCLR-like contrastive training: negatives come from every process."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


class TwoViews(Dataset):
    def __init__(self, n=512, dim=20):
        g = torch.Generator().manual_seed(8)
        centre = torch.randn(16, dim, generator=g)
        self.x = centre[torch.randint(0, 16, (n,), generator=g)] + 0.3 * torch.randn(n, dim, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return tuple(x + 0.2 * torch.randn_like(x) for _ in range(2))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.projector = nn.Linear(64, 16)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return F.normalize(self.projector(self.body(x)), dim=1), self.log_scale.exp().clamp(max=50)


def info_nce(z1, z2, scale, rank):
    all1, all2 = torch.cat(Gather.apply(z1)), torch.cat(Gather.apply(z2))
    target = torch.arange(len(z1)) + rank * len(z1)
    return 0.5 * (F.cross_entropy(scale * z1 @ all2.T, target) + F.cross_entropy(scale * z2 @ all1.T, target))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    model = DistributedDataParallel(Encoder())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = TwoViews()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 32, sampler=sampler, drop_last=True)
    torch.manual_seed(1000 * (rank + 1))
    for epoch in range(6):
        sampler.set_epoch(epoch)
        total = 0.0
        for a, b in loader:
            z, scale = model(torch.cat([a, b]))
            z1, z2 = z.chunk(2)
            loss = info_nce(z1, z2, scale, rank)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        dist.reduce(mean, dst=0)
        if rank == 0:
            print(f"[{epoch}] nce={mean.item() / dist.get_world_size():.4f} scale={scale.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
