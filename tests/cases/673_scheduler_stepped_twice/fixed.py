"""Optimizer and schedule come from a factory; a callback list drives the rest."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def create_optimizer_and_scheduler(params, lr, warmup, total):
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.01)

    def shape(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer, scheduler


class Callback:
    def on_step_end(self, run):
        pass

    def on_epoch_end(self, run):
        pass


class LRCallback(Callback):
    def on_step_end(self, run):
        run.scheduler.step()


class Report(Callback):
    def on_epoch_end(self, run):
        stat = torch.tensor([run.loss_sum, run.seen], dtype=torch.float64)
        dist.all_reduce(stat)
        if run.rank == 0:
            print(f"epoch {run.epoch}: loss {(stat[0] / stat[1]).item():.4f} lr {run.scheduler.get_last_lr()[0]:.2e}")


class Run:
    def __init__(self, model, data, epochs, batch, lr, callbacks):
        self.rank = dist.get_rank()
        self.model = DDP(model)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler)
        self.epochs, self.callbacks = epochs, callbacks
        total = epochs * len(self.loader)
        self.optimizer, self.scheduler = create_optimizer_and_scheduler(self.model.parameters(), lr, total // 10, total)

    def __call__(self):
        for self.epoch in range(self.epochs):
            self.sampler.set_epoch(self.epoch)
            self.loss_sum = self.seen = 0
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.loss_sum += loss.item() * len(x)
                self.seen += len(x)
                for c in self.callbacks:
                    c.on_step_end(self)
            for c in self.callbacks:
                c.on_epoch_end(self)


def kinematics(n):
    g = torch.Generator().manual_seed(44)
    q = 3.14 * (2 * torch.rand(n, 3, generator=g) - 1)
    c = q.cumsum(1)
    return TensorDataset(torch.cat([q.sin(), q.cos()], 1), torch.stack([c.cos().sum(1), c.sin().sum(1)], 1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 2))
    Run(net, kinematics(640), epochs=5, batch=32, lr=4e-3, callbacks=[Report()])()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
