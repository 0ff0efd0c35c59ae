"""Digit-sum regression with the one-cycle policy."""
import json
import math
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass(frozen=True)
class Cfg:
    epochs: int = 4
    batch_size: int = 16
    max_lr: float = 0.03
    width: int = 64
    samples: int = 480


class DigitSums(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.digits = torch.randint(0, 10, (n, 5), generator=g)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, i):
        d = self.digits[i]
        return nn.functional.one_hot(d, 10).float().flatten(), d.sum().float() / 10


class SumNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(50, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.f(x).squeeze(-1)


def run(cfg):
    rank = dist.get_rank()
    torch.manual_seed(2)
    train_set = DigitSums(cfg.samples, 31)
    sampler = DistributedSampler(train_set, seed=4)
    loader = DataLoader(train_set, batch_size=cfg.batch_size, sampler=sampler)
    model = DistributedDataParallel(SumNet(cfg.width))
    optimizer = optim.SGD(model.parameters(), lr=cfg.max_lr, momentum=0.9)
    steps = cfg.epochs * math.ceil(len(sampler) / cfg.batch_size)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=cfg.max_lr, total_steps=steps)

    history = []
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            seen += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(seen)
        history.append({"epoch": epoch, "mse": (seen[0] / seen[1]).item()})
        if rank == 0:
            print(history[-1], flush=True)
    if rank == 0:
        with open(os.path.join(os.getcwd(), "history.json"), "w") as f:
            json.dump({"cfg": asdict(cfg), "history": history}, f)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        run(Cfg())
    finally:
        dist.destroy_process_group()
