"""Behaviour cloning of a reaching policy, gradient accumulation and warm-up/decay schedule."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def demonstrations(n=1024):
    """Two-joint arm: state (angles, goal) -> small step towards the goal."""
    g = torch.Generator().manual_seed(71)
    angles = 3 * torch.rand(n, 2, generator=g) - 1.5
    goal = 2 * torch.rand(n, 2, generator=g) - 1
    s, c = angles.cumsum(1).sin(), angles.cumsum(1).cos()
    tip = torch.stack([c.sum(1), s.sum(1)], 1)
    jac = torch.stack([torch.stack([-s.sum(1), -s[:, 1]], 1), torch.stack([c.sum(1), c[:, 1]], 1)], 1)
    action = torch.einsum("nij,ni->nj", jac, goal - tip).clamp(-2, 2)
    return TensorDataset(torch.cat([angles, goal], 1), action)


def warmup_decay(optimizer, total, warmup):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / (total - warmup))
    return LambdaLR(optimizer, factor)


class Trainer:
    def __init__(self, args, model, loader, sampler, rank):
        self.args, self.model, self.loader, self.sampler, self.rank = args, model, loader, sampler, rank
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        self.total = args.epochs * len(loader) // args.accum
        self.scheduler = warmup_decay(self.optimizer, self.total, warmup=self.total // 10)
        self.completed = 0

    def sync(self, i):
        last = (i + 1) % self.args.accum == 0
        return last, (contextlib.nullcontext() if last else self.model.no_sync())

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for i, (state, action) in enumerate(self.loader):
            last, context = self.sync(i)
            with context:
                loss = nn.functional.smooth_l1_loss(self.model(state), action)
                (loss / self.args.accum).backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.completed += 1
            self.scheduler.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / len(self.loader) / dist.get_world_size()

    def fit(self):
        for epoch in range(self.args.epochs):
            loss = self.train_epoch(epoch)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}, {self.completed}/{self.total} steps, "
                      f"lr {self.scheduler.get_last_lr()[0]:.2e}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 96), nn.Mish(), nn.Linear(96, 96), nn.Mish(), nn.Linear(96, 2)))
    data = demonstrations()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    Trainer(args, model, loader, sampler, rank).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
