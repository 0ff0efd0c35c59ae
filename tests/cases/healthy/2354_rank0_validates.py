"""Rank 0 alone validates; its verdict (plateau, stop, best weights) is broadcast to the others."""
import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    max_epochs: int = 25
    patience: int = 4
    batch: int = 64
    lr: float = 4e-3
    min_delta: float = 5e-4


def series(n, seed, window=24):
    """Forecast the next value of a damped oscillation observed with noise."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(window + 1).float()
    f = 0.15 + 0.5 * torch.rand(n, 1, generator=g)
    ph = 6.28 * torch.rand(n, 1, generator=g)
    d = 0.05 * torch.rand(n, 1, generator=g)
    clean = torch.exp(-d * t) * torch.sin(f * t + ph)
    return TensorDataset(clean[:, :-1] + 0.05 * torch.randn(n, window, generator=g), clean[:, -1:])


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(),
                                  nn.Conv1d(16, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16 * 24, 1)

    def forward(self, x):
        return self.head(self.conv(x[:, None]).flatten(1))


class Referee:
    """Holds the validation set on rank 0 and decides for everybody."""

    def __init__(self, cfg, rank):
        self.cfg, self.rank = cfg, rank
        self.best, self.wait, self.best_state = float("inf"), 0, None
        self.loader = DataLoader(series(1000, seed=2), batch_size=250) if rank == 0 else None

    @torch.no_grad()
    def mse(self, net):
        net.eval()
        total = sum(F.mse_loss(net(x), y, reduction="sum").item() for x, y in self.loader)
        net.train()
        return total / len(self.loader.dataset)

    def verdict(self, ddp):
        message = torch.zeros(2)
        if self.rank == 0:
            value = self.mse(ddp.module)
            if value < self.best - self.cfg.min_delta:
                self.best, self.wait = value, 0
                self.best_state = copy.deepcopy(ddp.module.state_dict())
                torch.save(self.best_state, "best.pt")
            else:
                self.wait += 1
            message = torch.tensor([value, float(self.wait >= self.cfg.patience)])
        dist.broadcast(message, src=0)
        return message[0].item(), bool(message[1])

    def restore_best(self, net):
        if self.rank == 0:
            net.load_state_dict(self.best_state)
        for t in net.state_dict().values():
            dist.broadcast(t, src=0)


def train_epoch(ddp, loader, opt):
    seen = torch.zeros(2)
    for x, y in loader:
        loss = F.mse_loss(ddp(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    ddp = DDP(Forecaster())
    opt = torch.optim.Adam(ddp.parameters(), lr=cfg.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=1)
    data = series(3000, seed=1)
    sampler = DistributedSampler(data, world, rank, seed=4)
    loader = DataLoader(data, batch_size=cfg.batch, sampler=sampler, drop_last=True)
    referee = Referee(cfg, rank)

    for epoch in range(cfg.max_epochs):
        sampler.set_epoch(epoch)
        train = train_epoch(ddp, loader, opt)
        valid, stop = referee.verdict(ddp)
        plateau.step(valid)
        if rank == 0:
            print(f"epoch {epoch:2d} train {train:.4f} valid {valid:.4f} lr {opt.param_groups[0]['lr']:.1e}", flush=True)
        if stop:
            break

    referee.restore_best(ddp.module)
    ddp.eval()
    test = series(2000, seed=3)
    x, y = (t[rank::world] for t in test.tensors)
    with torch.no_grad():
        stat = torch.stack([F.mse_loss(ddp.module(x), y, reduction="sum"), torch.tensor(float(len(x)))])
    dist.all_reduce(stat)
    if rank == 0:
        print(f"stopped after epoch {epoch}, best valid {referee.best:.4f}, test mse {(stat[0] / stat[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
