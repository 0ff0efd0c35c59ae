import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    cache: Path = Path("cache/claims_v3.npz")
    rows: int = 60000
    raw_columns: int = 12
    batch_size: int = 256
    epochs: int = 3
    lr: float = 3e-3
    seed: int = 7


def simulate_claims(cfg):
    rng = np.random.default_rng(cfg.seed)
    raw = rng.gamma(2.0, 1.0, size=(cfg.rows, cfg.raw_columns)).astype(np.float32)
    w = rng.normal(size=cfg.raw_columns).astype(np.float32)
    cost = raw @ w + 0.5 * raw[:, 0] * raw[:, 1] + 0.1 * rng.normal(size=cfg.rows).astype(np.float32)
    return raw, cost.astype(np.float32)


def expand(raw):
    pairs = [raw[:, i:i + 1] * raw[:, i + 1:] for i in range(raw.shape[1] - 1)]
    logs = np.log1p(raw)
    ranks = np.argsort(np.argsort(raw, axis=0), axis=0).astype(np.float32) / len(raw)
    feats = np.concatenate([raw, logs, ranks, *pairs], axis=1)
    return (feats - feats.mean(0)) / (feats.std(0) + 1e-6)


def prepare_features(cfg):
    """Builds the feature table once; the rename makes the finished file appear in one piece."""
    if cfg.cache.exists():
        return
    cfg.cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cfg.cache.with_suffix(".partial")
    with open(partial, "wb") as fh:
        raw, cost = simulate_claims(cfg)
        feats = expand(raw)
        target = (cost - cost.mean()) / cost.std()
        np.savez(fh, x=feats.astype(np.float32), y=target)
    os.replace(partial, cfg.cache)


class Claims(Dataset):
    def __init__(self, path, part):
        with np.load(path) as z:
            cut = int(0.9 * len(z["y"]))
            sl = slice(0, cut) if part == "train" else slice(cut, None)
            self.x, self.y = torch.from_numpy(z["x"][sl]), torch.from_numpy(z["y"][sl])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build(width_in):
    return nn.Sequential(nn.Linear(width_in, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))


@torch.no_grad()
def r2(model, loader):
    model.eval()
    acc = torch.zeros(4, dtype=torch.float64)
    for x, y in loader:
        p = model(x).squeeze(1)
        acc += torch.tensor([((p - y) ** 2).sum(), y.sum(), (y ** 2).sum(), len(y)], dtype=torch.float64)
    dist.all_reduce(acc)
    sse, s1, s2, n = acc.tolist()
    return 1 - sse / (s2 - s1 * s1 / n)


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    prepare_features(cfg)
    dist.barrier()
    train, val = Claims(cfg.cache, "train"), Claims(cfg.cache, "val")

    torch.manual_seed(cfg.seed)
    model = DistributedDataParallel(build(train.x.shape[1]))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    sampler = DistributedSampler(train, shuffle=True, seed=cfg.seed, drop_last=True)
    loader = DataLoader(train, cfg.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 512, sampler=DistributedSampler(val, shuffle=False))
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=cfg.epochs * len(loader))
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.huber_loss(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        score = r2(model.module, val_loader)
        if rank == 0:
            print(f"[{epoch}] lr {sched.get_last_lr()[0]:.2e} r2 {score:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
