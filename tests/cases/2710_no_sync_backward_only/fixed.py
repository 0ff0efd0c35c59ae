"""Masked-feature pre-training with gradient accumulation."""
import contextlib
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainConfig:
    seed: int = 1986
    samples: int = 2048
    dim: int = 64
    hidden: int = 1024
    micro_batch: int = 16
    accum_grad: int = 8
    epochs: int = 4
    lr: float = 1e-3
    mask_prob: float = 0.3
    max_norm: float = 5.0


class MaskedAutoencoder(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.net = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.LayerNorm(hidden),
            nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden),
            nn.Linear(hidden, dim),
        )

    def forward(self, x, mask):
        corrupted = torch.where(mask, self.mask_token, x)
        return self.net(corrupted)


def make_features(cfg):
    g = torch.Generator().manual_seed(31)
    mix = torch.randn(8, cfg.dim, generator=g)
    latent = torch.randn(cfg.samples, 8, generator=g)
    return TensorDataset(torch.tanh(latent @ mix) + 0.05 * torch.randn(cfg.samples, cfg.dim, generator=g))


class Brain:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        torch.manual_seed(cfg.seed)
        self.model = DistributedDataParallel(MaskedAutoencoder(cfg.dim, cfg.hidden), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.01)
        data = make_features(cfg)
        self.sampler = DistributedSampler(data, shuffle=True, seed=cfg.seed, drop_last=True)
        self.loader = DataLoader(data, cfg.micro_batch, sampler=self.sampler, drop_last=True)
        assert len(self.loader) % cfg.accum_grad == 0
        self.rng = torch.Generator().manual_seed(cfg.seed + 17 * (self.rank + 1))
        self.step = 0
        self.optimizer_step = 0

    @contextlib.contextmanager
    def maybe_no_sync(self, should_step):
        if should_step:
            yield
        else:
            with self.model.no_sync():
                yield

    def compute_loss(self, x):
        mask = torch.rand(x.shape, generator=self.rng) < self.cfg.mask_prob
        pred = self.model(x, mask)
        return F.mse_loss(pred[mask], x[mask])

    def fit_batch(self, x):
        should_step = (self.step + 1) % self.cfg.accum_grad == 0
        with self.maybe_no_sync(should_step):
            loss = self.compute_loss(x)
            (loss / self.cfg.accum_grad).backward()
        if should_step:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer_step += 1
        self.step += 1
        return loss.detach()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            begin = time.perf_counter()
            total = torch.zeros(2)
            for (x,) in self.loader:
                total += torch.stack([self.fit_batch(x), torch.tensor(1.0)])
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch} train loss {total[0] / total[1]:.4f} updates {self.optimizer_step} "
                      f"({time.perf_counter() - begin:.2f}s)", flush=True)
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "step": self.optimizer_step}, "pretrain.ckpt")
        dist.barrier()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Brain(TrainConfig()).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
