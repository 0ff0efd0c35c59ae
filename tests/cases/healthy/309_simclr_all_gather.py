"""SimCLR on vectors: two augmented views, NT-Xent over the views of all ranks, a gather that lets gradients through."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    batch: int = 16
    epochs: int = 3
    temperature: float = 0.3
    lr: float = 3e-3
    seed: int = 7


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        all_grads = torch.stack(grads)
        dist.all_reduce(all_grads)
        return all_grads[dist.get_rank()]


class TwoViews(Dataset):
    def __init__(self, n, dim=20):
        g = torch.Generator().manual_seed(0)
        centers = torch.randn(10, dim, generator=g) * 2
        self.y = torch.randint(10, (n,), generator=g)
        self.x = centers[self.y] + 0.3 * torch.randn(n, dim, generator=g)

    def __len__(self):
        return len(self.x)

    def augment(self, v):
        return v * (torch.rand_like(v) > 0.2) + 0.2 * torch.randn_like(v)

    def __getitem__(self, i):
        return self.augment(self.x[i]), self.augment(self.x[i])


class SimCLR(nn.Module):
    def __init__(self, dim=20, width=64, out=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out, bias=False))

    def forward(self, a, b):
        z = self.projector(self.backbone(torch.cat([a, b])))
        return F.normalize(z, dim=1).chunk(2)


def nt_xent(z_i, z_j, temperature):
    z_i, z_j = torch.cat(GatherLayer.apply(z_i)), torch.cat(GatherLayer.apply(z_j))
    n = len(z_i)
    z = torch.cat([z_i, z_j])
    sim = z @ z.T / temperature
    sim.fill_diagonal_(float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)  # the same number on every rank


def main(cfg: Config):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(cfg.seed)
    model = SimCLR()
    ddp = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(cfg.seed * 1000 + rank)  # own augmentations
    optimizer = torch.optim.Adam(ddp.parameters(), lr=cfg.lr, weight_decay=1e-6)
    data = TwoViews(320)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, cfg.batch, sampler=sampler, drop_last=True)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for a, b in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nt_xent(*ddp(a, b), cfg.temperature)
            loss.backward()
            optimizer.step()
            running += loss.item()
        if rank == 0:
            print(f"epoch {epoch:2d}  nt-xent {running / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
