"""Engine with hooks: trains, and a second engine continues from the stored weights."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Hook:
    def before_run(self, engine):
        pass

    def after_epoch(self, engine):
        pass

    def after_run(self, engine):
        pass


class Printer(Hook):
    def after_epoch(self, engine):
        value = torch.tensor(engine.epoch_loss)
        dist.all_reduce(value)
        if engine.is_main:
            print(f"[{engine.name}] epoch {engine.epoch}: {value.item() / dist.get_world_size():.4f}", flush=True)


class Saver(Hook):
    def __init__(self, path):
        self.path = path

    def after_run(self, engine):
        if engine.is_main:
            torch.save(engine.net.state_dict(), self.path)
        dist.barrier()


class Starter(Hook):
    def __init__(self, path):
        self.path = path

    def before_run(self, engine):
        if engine.is_main and os.path.exists(self.path):
            engine.net.load_state_dict(torch.load(self.path, map_location="cpu"))
            print(f"[{engine.name}] weights from {self.path}", flush=True)


class Engine:
    def __init__(self, name, hooks, first, last, lr, seed):
        self.name, self.hooks, self.first, self.last = name, hooks, first, last
        self.is_main = dist.get_rank() == 0
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(14, 40), nn.ELU(), nn.Linear(40, 14)))
        torch.manual_seed(100 * seed + dist.get_rank())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr)
        g = torch.Generator().manual_seed(15)
        low = torch.randn(320, 3, generator=g) @ torch.randn(3, 14, generator=g)
        self.data = TensorDataset(low)
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, batch_size=16, sampler=self.sampler)

    @property
    def net(self):
        return self.model.module

    def call(self, event):
        for hook in self.hooks:
            getattr(hook, event)(self)

    def run(self):
        self.call("before_run")
        for self.epoch in range(self.first, self.last):
            self.sampler.set_epoch(self.epoch)
            losses = []
            for (x,) in self.loader:
                loss = F.mse_loss(self.model(x + 0.05 * torch.randn_like(x)), x)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                losses.append(loss.item())
            self.epoch_loss = sum(losses) / len(losses)
            self.call("after_epoch")
        self.call("after_run")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path = "denoiser.pt"
    Engine("first", [Printer(), Saver(path)], 0, 4, lr=0.05, seed=1).run()
    Engine("second", [Starter(path), Printer(), Saver(path)], 4, 8, lr=0.02, seed=2).run()
    dist.destroy_process_group()
