"""Small regression set with noisy targets; the weights of the best epoch are tested."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def noisy(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 5, generator=g) - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2]
    return x, (y + noise * torch.randn(n, generator=g)).unsqueeze(1)


class Callback:
    def on_epoch_end(self, trainer, epoch, value):
        pass

    def on_train_end(self, trainer):
        pass


class KeepBest(Callback):
    def __init__(self):
        self.value, self.epoch, self.weights = math.inf, -1, None

    def on_epoch_end(self, trainer, epoch, value):
        if value < self.value:
            self.value, self.epoch = value, epoch
            self.weights = {k: v.clone() for k, v in trainer.net.state_dict().items()}

    def on_train_end(self, trainer):
        trainer.net.load_state_dict(self.weights)
        if dist.get_rank() == 0:
            torch.save(self.weights, "best.pt")
            print(f"best epoch {self.epoch}, validation {self.value:.4f}")


class Report(Callback):
    def on_epoch_end(self, trainer, epoch, value):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation {value:.4f}", flush=True)


class Trainer:
    def __init__(self, net, lr, callbacks):
        self.net, self.ddp = net, DDP(net)
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        self.callbacks = callbacks

    @torch.no_grad()
    def evaluate(self, x, y):
        return nn.functional.mse_loss(self.net(x), y).item()

    def fit(self, train, val, epochs, batch_size):
        data = TensorDataset(*train)
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                self.opt.zero_grad()
                nn.functional.mse_loss(self.ddp(x), y).backward()
                self.opt.step()
            value = self.evaluate(*val)  # same small set on every process
            for cb in self.callbacks:
                cb.on_epoch_end(self, epoch, value)
        for cb in self.callbacks:
            cb.on_train_end(self)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=14)
    ap.add_argument("--lr", type=float, default=2e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(5, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    trainer = Trainer(net, args.lr, [Report(), KeepBest()])
    trainer.fit(noisy(96, 1, 0.4), noisy(64, 2, 0.1), args.epochs, batch_size=8)
    test = trainer.evaluate(*noisy(200, 3, 0.1))
    if dist.get_rank() == 0:
        print(f"test error {test:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
