"""Deep residual network trained by a small configurable trainer."""
import os
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class ModelConfig:
    dim: int = 24
    width: int = 48
    blocks: int = 32
    classes: int = 4


@dataclass
class TrainConfig:
    epochs: int = 3
    batch_size: int = 8
    lr: float = 1e-3
    find_unused_parameters: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + 0.2 * torch.relu(self.fc(self.norm(x)))


class ResNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.stem = nn.Linear(cfg.dim, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg.width) for _ in range(cfg.blocks))
        self.head = nn.Linear(cfg.width, cfg.classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        torch.manual_seed(21)
        self.model = DistributedDataParallel(
            ResNet(cfg.model), find_unused_parameters=cfg.find_unused_parameters
        )
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)

    def loader(self):
        g = torch.Generator().manual_seed(8)
        x = torch.randn(512, self.cfg.model.dim, generator=g)
        data = TensorDataset(x, x.view(-1, 4, self.cfg.model.dim // 4).sum(2).argmax(1))
        sampler = DistributedSampler(data)
        return sampler, DataLoader(data, batch_size=self.cfg.batch_size, sampler=sampler)

    def fit(self):
        sampler, loader = self.loader()
        for epoch in range(self.cfg.epochs):
            sampler.set_epoch(epoch)
            start = time.perf_counter()
            meter = torch.zeros(2)
            for x, y in loader:
                out = self.model(x)
                loss = nn.functional.cross_entropy(out, y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                meter += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
            dist.all_reduce(meter)
            if self.rank == 0:
                took = time.perf_counter() - start
                print(f"epoch {epoch}: accuracy {(meter[0] / meter[1]).item():.3f} in {took:.2f} s", flush=True)


if __name__ == "__main__":
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    Trainer(TrainConfig()).fit()
    dist.destroy_process_group()
