"""Restart-ready tabular training with quantisation-aware layers; runs under torchrun or srun."""
import os
import signal
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    epochs: int = 14
    batch_size: int = 64
    lr: float = 3e-3
    hidden: int = 64
    freeze_observer_epoch: int = 6
    patience: int = 4
    min_delta: float = 1e-3
    snapshot: str = "snapshot/state.pt"
    seed: int = 21
    cardinalities: list = field(default_factory=lambda: [7, 4, 12])


def setup_distributed():
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ.setdefault("MASTER_ADDR", os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 20000))
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


class FakeQuant(nn.Module):
    def __init__(self, bits=8, momentum=0.1):
        super().__init__()
        self.levels, self.momentum, self.observing = 2 ** bits - 1, momentum, True
        self.register_buffer("lo", torch.tensor(0.0))
        self.register_buffer("hi", torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(False))

    @torch.no_grad()
    def observe(self, x):
        lo, hi = x.min().clamp(max=0), x.max().clamp(min=0)
        if not self.seen:
            self.lo.copy_(lo), self.hi.copy_(hi), self.seen.fill_(True)
        else:
            self.lo.lerp_(lo, self.momentum), self.hi.lerp_(hi, self.momentum)

    def forward(self, x):
        if self.training and self.observing:
            self.observe(x)
        scale = ((self.hi - self.lo) / self.levels).clamp(min=1e-8)
        q = torch.round(x.clamp(self.lo, self.hi) / scale) * scale
        return x + (q - x).detach()


class QATLinear(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.act = FakeQuant()

    def forward(self, x):
        step = self.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        w = self.weight + (torch.round(self.weight / step) * step - self.weight).detach()
        return F.linear(self.act(x), w, self.bias)


class TabularNet(nn.Module):
    def __init__(self, cfg, n_num, n_cls):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(c, min(6, c)) for c in cfg.cardinalities)
        d = n_num + sum(e.embedding_dim for e in self.embeds)
        self.layers = nn.Sequential(QATLinear(d, cfg.hidden), nn.ReLU(), nn.Dropout(0.1), QATLinear(cfg.hidden, cfg.hidden),
                                    nn.ReLU(), QATLinear(cfg.hidden, n_cls))

    def forward(self, cat, num):
        return self.layers(torch.cat([e(cat[:, i]) for i, e in enumerate(self.embeds)] + [num], 1))


def table(n, cfg, seed):
    w = torch.Generator().manual_seed(303)
    effect = [torch.randn(c, 3, generator=w) for c in cfg.cardinalities]
    mix = torch.randn(8, 3, generator=w)
    g = torch.Generator().manual_seed(seed)
    cat = torch.stack([torch.randint(0, c, (n,), generator=g) for c in cfg.cardinalities], 1)
    num = torch.randn(n, 8, generator=g)
    score = num @ mix + sum(1.5 * e[cat[:, i]] for i, e in enumerate(effect)) + (num[:, :1] * num[:, 1:2])
    return TensorDataset(cat, num, (score + 0.5 * torch.randn(n, 3, generator=g)).argmax(1))


class Job:
    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world, self.stop_requested = cfg, rank, world, False
        signal.signal(signal.SIGTERM, self._on_term)
        torch.manual_seed(cfg.seed)
        self.model = DistributedDataParallel(TabularNet(cfg, 8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3 * cfg.lr, total_steps=cfg.epochs * 20)
        train, self.valid = table(2560, cfg, 1), table(501, cfg, 2)
        self.sampler = DistributedSampler(train, shuffle=True, seed=cfg.seed)
        self.loader = DataLoader(train, batch_size=cfg.batch_size, sampler=self.sampler, drop_last=True)
        self.epoch, self.best, self.bad = 0, float("inf"), 0
        self._maybe_resume()

    def _on_term(self, signum, frame):
        self.stop_requested = True

    def _maybe_resume(self):
        if os.path.exists(self.cfg.snapshot):
            s = torch.load(self.cfg.snapshot, map_location="cpu", weights_only=True)
            self.model.module.load_state_dict(s["model"])
            self.optimizer.load_state_dict(s["optimizer"])
            self.scheduler.load_state_dict(s["scheduler"])
            self.epoch, self.best, self.bad = s["epoch"], s["best"], s["bad"]
        torch.manual_seed(self.cfg.seed * 1000 + self.epoch * self.world + self.rank)

    def snapshot(self):
        if self.rank == 0:
            tmp = self.cfg.snapshot + ".tmp"
            os.makedirs(os.path.dirname(self.cfg.snapshot), exist_ok=True)
            torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "scheduler": self.scheduler.state_dict(), "epoch": self.epoch, "best": self.best,
                        "bad": self.bad}, tmp)
            os.replace(tmp, self.cfg.snapshot)
        dist.barrier()

    def set_observers(self, on):
        for m in self.model.modules():
            if isinstance(m, FakeQuant):
                m.observing = on

    def train_epoch(self):
        self.model.train()
        self.set_observers(self.epoch < self.cfg.freeze_observer_epoch)
        self.sampler.set_epoch(self.epoch)
        sums = torch.zeros(2, dtype=torch.float64)
        for cat, num, y in self.loader:
            loss = F.cross_entropy(self.model(cat, num), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            sums += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    @torch.no_grad()
    def validate(self):
        # the ranges last observed belong to each process; the first one's are exported, so use those
        for buf in self.model.module.buffers():
            dist.broadcast(buf, src=0)
        self.model.eval()
        cat, num, y = (t[self.rank::self.world] for t in self.valid.tensors)
        out = self.model.module(cat, num)
        sums = torch.tensor([F.cross_entropy(out, y, reduction="sum").item(), (out.argmax(1) == y).sum().item(), len(y)],
                            dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()

    def should_stop(self):
        flag = torch.tensor([float(self.stop_requested), float(self.bad >= self.cfg.patience)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.max() > 0)

    def run(self):
        while self.epoch < self.cfg.epochs:
            train_loss = self.train_epoch()
            loss, acc = self.validate()
            self.bad = 0 if loss < self.best - self.cfg.min_delta else self.bad + 1
            self.best = min(self.best, loss)
            self.epoch += 1
            if self.rank == 0:
                print(f"epoch {self.epoch}: train {train_loss:.4f} valid {loss:.4f} acc {acc:.3f} bad {self.bad}")
            self.snapshot()
            if self.should_stop():
                break


@record
def main():
    rank, world = setup_distributed()
    Job(Config(), rank, world).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
