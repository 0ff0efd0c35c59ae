"""Contrastive pairs: two noisy views of the same item belong together."""
import random
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

cfg = SimpleNamespace(items=288, dim=20, batch=24, epochs=5, lr=3e-3, temperature=0.2, seed=42)


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    return seed


class Views(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(7)
        self.items = torch.randn(cfg.items, cfg.dim, generator=g)

    def __len__(self):
        return cfg.items

    def __getitem__(self, i):
        item = self.items[i]
        scale = random.uniform(0.8, 1.2)
        return scale * item + 0.3 * torch.randn(cfg.dim), item + 0.3 * torch.randn(cfg.dim)


def info_nce(a, b):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    logits = a @ b.t() / cfg.temperature
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)), logits


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(cfg.dim, 64), nn.ReLU())
        self.projector = nn.Linear(64, 16)

    def forward(self, a, b):
        both = self.projector(self.backbone(torch.cat([a, b])))
        return both.chunk(2)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed = seed_everything(cfg.seed + rank)
    data = Views()
    sampler = DistributedSampler(data, shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(data, batch_size=cfg.batch, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        tally = torch.zeros(3)
        for a, b in loader:
            loss, logits = info_nce(*model(a, b))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found = (logits.argmax(1) == torch.arange(len(a))).sum().item()
            tally += torch.tensor([loss.item() * len(a), found, len(a)])
        dist.all_reduce(tally)
        if rank == 0:
            print(f"epoch {epoch}: nce {(tally[0] / tally[2]).item():.4f} top1 {(tally[1] / tally[2]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
