"""Noise prediction on 2-d points with a trainer that has callbacks."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        t = t.unsqueeze(1)
        return self.body(torch.cat([x, t, torch.sin(6 * t), torch.cos(6 * t)], 1))


def spiral(n, gen):
    r = torch.rand(n, generator=gen)
    return torch.stack([r * torch.cos(9 * r), r * torch.sin(9 * r)], 1) * 2


class Callback:
    def on_epoch_start(self, trainer): ...

    def on_step_end(self, trainer, loss): ...

    def on_epoch_end(self, trainer): ...


class LossPrinter(Callback):
    def on_epoch_start(self, trainer):
        self.total, self.count = torch.zeros(()), 0

    def on_step_end(self, trainer, loss):
        self.total += loss
        self.count += 1

    def on_epoch_end(self, trainer):
        dist.all_reduce(self.total)
        if trainer.rank == 0:
            print(f"epoch {trainer.epoch}: loss {self.total.item() / self.count / trainer.world:.4f}")


class Snapshot(Callback):
    """Half-size copy of the weights after every epoch."""

    def on_epoch_end(self, trainer):
        net, path = trainer.model.module, f"snapshot_{trainer.epoch}.pt"
        if trainer.rank == 0:
            torch.save({name: value.to(torch.bfloat16) for name, value in net.state_dict().items()}, path)


class Trainer:
    def __init__(self, net, lr, callbacks):
        self.rank, self.world, self.epoch = dist.get_rank(), dist.get_world_size(), 0
        self.model = DDP(net)
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        self.callbacks = callbacks
        self.gen = torch.Generator().manual_seed(300 + self.rank)

    def call(self, hook, *args):
        for cb in self.callbacks:
            getattr(cb, hook)(self, *args)

    def step(self, batch=64):
        x0, t = spiral(batch, self.gen), torch.rand(batch, generator=self.gen)
        noise = torch.randn(batch, 2, generator=self.gen)
        signal = torch.cos(t * math.pi / 2).unsqueeze(1)
        xt = signal * x0 + (1 - signal**2).sqrt() * noise
        loss = nn.functional.mse_loss(self.model(xt, t), noise)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self, epochs, steps):
        for self.epoch in range(epochs):
            self.call("on_epoch_start")
            for _ in range(steps):
                self.call("on_step_end", self.step())
            self.call("on_epoch_end")


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(12)
    Trainer(Denoiser(), lr=2e-3, callbacks=[LossPrinter(), Snapshot()]).fit(epochs=5, steps=30)
    dist.barrier()
    dist.destroy_process_group()
