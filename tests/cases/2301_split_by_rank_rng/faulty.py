"""Credit-risk style tabular regression: one table, random hold-out, data-parallel MLP."""
import dataclasses
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclasses.dataclass
class Config:
    rows: int = 2400
    holdout: int = 400
    n_num: int = 10
    n_cat: int = 4
    levels: int = 9
    width: int = 128
    batch_size: int = 50
    lr: float = 2e-3
    weight_decay: float = 1e-4
    epochs: int = 8
    seed: int = 17


def build_table(cfg):
    g = torch.Generator().manual_seed(2024)
    num = torch.randn(cfg.rows, cfg.n_num, generator=g)
    cat = torch.randint(0, cfg.levels, (cfg.rows, cfg.n_cat), generator=g)
    effects = torch.randn(cfg.n_cat, cfg.levels, generator=g)
    target = num[:, 0] * num[:, 1] + 0.7 * num[:, 2].abs() - num[:, 3]
    for c in range(cfg.n_cat):
        target = target + 0.6 * effects[c][cat[:, c]]
    target = target + 0.4 * torch.randn(cfg.rows, generator=g)
    target = (target - target.mean()) / target.std()
    return TensorDataset(num, cat, target)


class TabularNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(cfg.levels, 6) for _ in range(cfg.n_cat)])
        self.trunk = nn.Sequential(
            nn.Linear(cfg.n_num + 6 * cfg.n_cat, cfg.width),
            nn.LayerNorm(cfg.width),
            nn.SiLU(),
            nn.Linear(cfg.width, cfg.width),
            nn.SiLU(),
            nn.Linear(cfg.width, 1),
        )

    def forward(self, num, cat):
        parts = [num] + [emb(cat[:, i]) for i, emb in enumerate(self.embeds)]
        return self.trunk(torch.cat(parts, dim=1)).squeeze(1)


def loaders(cfg, rank, world):
    table = build_table(cfg)
    sizes = [cfg.rows - cfg.holdout, cfg.holdout]
    train_set, val_set = random_split(table, sizes)
    train_sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=cfg.seed)
    val_sampler = DistributedSampler(val_set, world, rank, shuffle=False)
    train = DataLoader(train_set, cfg.batch_size, sampler=train_sampler, drop_last=True)
    val = DataLoader(val_set, 100, sampler=val_sampler)
    return train, val, train_sampler


@torch.no_grad()
def validate(net, loader):
    net.eval()
    acc = torch.zeros(2, dtype=torch.float64)
    for num, cat, y in loader:
        acc[0] += F.mse_loss(net(num, cat), y, reduction="sum").double()
        acc[1] += y.numel()
    dist.all_reduce(acc)
    net.train()
    return (acc[0] / acc[1]).item()


def train_epoch(model, loader, opt, sched):
    acc = torch.zeros(2, dtype=torch.float64)
    for num, cat, y in loader:
        loss = F.mse_loss(model(num, cat), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        acc[0] += loss.detach().double() * y.numel()
        acc[1] += y.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = Config()
    torch.manual_seed(cfg.seed + rank)

    train_loader, val_loader, sampler = loaders(cfg, rank, world)
    model = DistributedDataParallel(TabularNet(cfg))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=cfg.epochs * len(train_loader))

    best = float("inf")
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        train_mse = train_epoch(model, train_loader, opt, sched)
        val_mse = validate(model.module, val_loader)
        best = min(best, val_mse)
        if rank == 0:
            print(f"[{epoch}] train mse {train_mse:.4f}  val mse {val_mse:.4f}  best {best:.4f}", flush=True)
    if rank == 0:
        os.makedirs("out", exist_ok=True)
        torch.save(model.module.state_dict(), "out/tabular.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
