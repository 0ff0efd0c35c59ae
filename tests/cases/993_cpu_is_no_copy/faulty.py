"""Trains a regressor and returns the mean of the weights of the last epochs (checkpoint averaging)."""
import argparse
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Snapshots:
    def __init__(self, keep):
        self.kept = deque(maxlen=keep)

    def take(self, module):
        self.kept.append({k: v.detach().cpu() for k, v in module.state_dict().items()})

    def mean(self):
        first = self.kept[0]
        return {k: torch.stack([s[k].float() for s in self.kept]).mean(0).to(first[k].dtype) for k in first}


class Callbacks(list):
    def fire(self, event, *args):
        for cb in self:
            getattr(cb, event, lambda *a: None)(*args)


class Averaging:
    def __init__(self, keep, start):
        self.snapshots, self.start = Snapshots(keep), start

    def epoch_done(self, epoch, model):
        if epoch >= self.start:
            self.snapshots.take(model.module)

    def training_done(self, model):
        model.module.load_state_dict(self.snapshots.mean())


class Printer:
    def loss(self, epoch, value):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mse {value:.4f}")


def mse(model, data):
    with torch.no_grad():
        x, y = data[dist.get_rank() :: dist.get_world_size()]
        err = torch.tensor([nn.functional.mse_loss(model(x), y, reduction="sum").item(), y.numel()])
    dist.all_reduce(err)
    return (err[0] / err[1]).item()


def pendulum(n, seed):
    gen = torch.Generator().manual_seed(seed)
    s = torch.randn(n, 4, generator=gen)
    return TensorDataset(s, torch.stack([s[:, 1], -s[:, 0].sin() + 0.1 * s[:, 2], s[:, 3] * s[:, 0]], 1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--keep", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.03)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(30)
    model = DDP(nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    callbacks = Callbacks([Printer(), Averaging(args.keep, args.epochs - args.keep)])
    train, test = pendulum(480, 1), pendulum(200, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        callbacks.fire("loss", epoch, mse(model, test))
        callbacks.fire("epoch_done", epoch, model)
    callbacks.fire("training_done", model)
    callbacks.fire("loss", "averaged", mse(model, test))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
