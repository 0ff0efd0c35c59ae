"""Patch classifier trained in two legs; torch.distributed.checkpoint carries the run across."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def patches(n, seed, classes=6, side=12):
    proto = torch.randn(classes, 1, side, side, generator=torch.Generator().manual_seed(40))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    shift = torch.randint(-1, 2, (n,), generator=g)
    x = torch.stack([proto[c].roll(int(s), dims=2) for c, s in zip(y, shift)])
    return TensorDataset(x + 1.2 * torch.randn(x.shape, generator=g), y)


class PatchNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
        )
        self.head = nn.Linear(32 * 9, classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Run:
    """Everything that has to survive a restart."""

    def __init__(self, args, steps_per_epoch):
        torch.manual_seed(args.seed)
        self.model = DDP(PatchNet())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.99))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=args.epochs * steps_per_epoch)
        self.epoch = 0

    def save(self, path):
        state = {
            "model": self.model.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "epoch": self.epoch,
        }
        dcp.save(state, checkpoint_id=path)

    def load(self, path):
        state = {
            "model": self.model.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "epoch": self.epoch,
        }
        dcp.load(state, checkpoint_id=path)
        self.epoch = state["epoch"]


def train_leg(run, until, loader, sampler, test, rank, world):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    while run.epoch < until:
        sampler.set_epoch(run.epoch)
        meter = torch.zeros(2)
        for x, y in loader:
            run.optimizer.zero_grad()
            loss = criterion(run.model(x), y)
            loss.backward()
            run.optimizer.step()
            run.schedule.step()
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        run.epoch += 1
        acc = accuracy(run.model, test, rank, world)
        if rank == 0:
            print(f"epoch {run.epoch} loss {meter[0] / meter[1]:.4f} accuracy {acc:.3f} "
                  f"lr {run.schedule.get_last_lr()[0]:.2e}", flush=True)


@torch.no_grad()
def accuracy(model, test, rank, world):
    model.eval()
    x, y = (t[rank::world] for t in test.tensors)
    stats = torch.tensor([(model.module(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--first-leg", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--ckpt", default="ckpt")
    ap.add_argument("--seed", type=int, default=19)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = patches(2048, seed=1), patches(512, seed=2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    run = Run(args, len(loader))
    train_leg(run, args.first_leg, loader, sampler, test, rank, world)
    path = os.path.join(args.ckpt, f"epoch{run.epoch}")
    run.save(path)
    if rank == 0:
        print(f"saved {path}, restarting from it", flush=True)
    del run

    resumed = Run(args, len(loader))
    resumed.load(path)
    train_leg(resumed, args.epochs, loader, sampler, test, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
