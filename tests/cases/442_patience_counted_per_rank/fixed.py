"""Keras-like callbacks with early stopping."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class StopTraining(Exception):
    pass


class EarlyStopping:
    def __init__(self, monitor="val_loss", patience=2, min_delta=2e-3):
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.best, self.bad = math.inf, 0

    def on_epoch_end(self, epoch, logs):
        value = logs[self.monitor]
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
            return
        self.bad += 1
        if self.bad >= self.patience:
            raise StopTraining(f"{self.monitor} did not improve since epoch {epoch - self.bad}")


class Model:
    def __init__(self, net, lr):
        self.ddp = DDP(net)
        self.opt = torch.optim.Adam(self.ddp.parameters(), lr=lr)

    def train_epoch(self, loader):
        self.ddp.train()
        for x, y in loader:
            loss = nn.functional.mse_loss(self.ddp(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def evaluate(self, x, y):
        self.ddp.eval()
        loss = nn.functional.mse_loss(self.ddp.module(x), y)
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        return loss.item()

    def fit(self, loader, val, epochs, callbacks):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            self.train_epoch(loader)
            logs = {"val_loss": self.evaluate(*val)}
            for cb in callbacks:
                cb.on_epoch_end(epoch, logs)
        return logs


def field(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=g)
    y = (5 * x[:, :1]).sin() * x[:, 1:] + noise * torch.randn(n, 1, generator=g)
    return x, y


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    data = TensorDataset(*field(256, 3, 0.05))
    loader = DataLoader(data, 32, sampler=DistributedSampler(data))
    val = field(80, 30 + rank, 0.02 if rank == 0 else 0.6)
    model = Model(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)), 5e-3)
    try:
        model.fit(loader, val, epochs=20, callbacks=[EarlyStopping()])
    except StopTraining as reason:
        print(f"rank {rank}: stopped, {reason}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
