"""Classifier with an EMA of the weights; both are validated."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

CONFIG = dict(epochs=4, batch=16, lr=0.05, decay=0.95, seed=9)


def net():
    return nn.Sequential(
        nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)
    )


class Ema:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)
        for e, b in zip(self.model.buffers(), model.buffers()):
            e.copy_(b)


def points(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    r = x[:, :4].pow(2).sum(1)
    return TensorDataset(x, (r > 2.5).long() + (r > 5).long())


@torch.no_grad()
def accuracy(model, loader):
    c = torch.zeros(2)
    for x, y in loader:
        c += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main(cfg):
    dist.init_process_group("gloo")
    torch.manual_seed(cfg["seed"])
    raw = net()
    model = DDP(raw)
    ema = Ema(raw, cfg["decay"])
    train_set, val_set = points(320, 1), points(128, 2)
    sampler = DistributedSampler(train_set, seed=cfg["seed"])
    train = DataLoader(train_set, cfg["batch"], sampler=sampler)
    val = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            ema.update(raw)
        ema.model.eval()
        live, averaged = accuracy(raw, val), accuracy(ema.model, val)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: live {live:.3f} ema {averaged:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CONFIG)
