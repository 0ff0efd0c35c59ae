"""A very small trainer with hooks, used for a field reconstruction."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Fields(Dataset):
    def __init__(self, n=192, size=64):
        self.n, self.size = n, size
        axis = torch.linspace(-1, 1, size)
        self.yy, self.xx = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        c = torch.rand(3, generator=g)
        field = torch.sin(4 * c[0] * self.xx) * torch.cos(4 * c[1] * self.yy) + c[2]
        return field[None] + 0.1 * torch.randn(1, self.size, self.size, generator=g), field[None]


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.Conv2d(6, 8, 5, padding=2))
        self.outputs = []

    def forward(self, x):
        parts = self.net(x)
        return x + parts.mean(1, keepdim=True), parts

    def training_step(self, ddp, batch):
        x, y = batch
        pred, parts = ddp(x)
        loss = (pred - y).pow(2).mean()
        self.outputs.append({"loss": loss.detach(), "parts": parts.detach()})
        return loss

    def on_epoch_end(self):
        spread = torch.stack([o["parts"].std() for o in self.outputs[-12:]]).mean()
        loss = torch.stack([o["loss"] for o in self.outputs[-12:]]).mean()
        return loss, spread


class Trainer:
    def __init__(self, epochs):
        self.epochs = epochs
        self.rank = int(os.environ["RANK"])

    def fit(self, module, dataset):
        ddp = DDP(module)
        opt = torch.optim.Adam(module.parameters(), lr=2e-3)
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                opt.zero_grad()
                module.training_step(ddp, batch).backward()
                opt.step()
            log = torch.stack(module.on_epoch_end())
            dist.all_reduce(log)
            if self.rank == 0:
                loss, spread = (log / dist.get_world_size()).tolist()
                print(f"epoch {epoch}: loss {loss:.4f}, spread {spread:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(epochs=12).fit(Module(), Fields())
    dist.destroy_process_group()
