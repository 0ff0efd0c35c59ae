"""Tiny two-tower contrastive pre-training with negatives from all ranks."""
import dataclasses
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class Config:
    epochs: int = 4
    batch_size: int = 16
    lr: float = 2e-3
    width: int = 48
    embed: int = 24


class Pairs(Dataset):
    """(image vector, token ids) made from one hidden concept."""

    def __init__(self, n=256):
        g = torch.Generator().manual_seed(12)
        concept = torch.randn(n, 8, generator=g)
        self.image = concept @ torch.randn(8, 20, generator=g) + 0.1 * torch.randn(n, 20, generator=g)
        self.text = (concept @ torch.randn(8, 6, generator=g) * 3).round().clamp(-15, 15).long() + 15

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.text[i]


class TwoTower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(20, cfg.width), nn.GELU(), nn.Linear(cfg.width, cfg.embed))
        self.tokens = nn.Embedding(31, cfg.width)
        self.textual = nn.Sequential(nn.GELU(), nn.Linear(6 * cfg.width, cfg.embed))
        self.logit_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, image, text):
        v = F.normalize(self.visual(image), dim=-1)
        t = F.normalize(self.textual(self.tokens(text).flatten(1)), dim=-1)
        return v, t, self.logit_scale.exp()


def gather(x):
    return torch.cat(dist_fn.all_gather(x))


def clip_loss(v, t, scale):
    """Rows of this rank against the columns of all ranks."""
    all_v, all_t = gather(v), gather(t)
    target = torch.arange(len(v)) + dist.get_rank() * len(v)
    li = F.cross_entropy(scale * v @ all_t.T, target)
    lt = F.cross_entropy(scale * t @ all_v.T, target)
    return (li + lt) / 2


def train(cfg):
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTower(cfg))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    data = Pairs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for image, text in loader:
            v, t, scale = model(image, text)
            loss = clip_loss(v, t, scale)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, 4.6)
            total += loss.item()
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} contrastive loss {mean.item() / dist.get_world_size():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Config())
    dist.destroy_process_group()
