"""k-fold cross validation; before it a learning-rate range test on a throw-away copy. Folds come from one seed on all ranks."""
import copy
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@dataclass(frozen=True)
class Settings:
    k: int = 3
    epochs: int = 3
    batch: int = 16
    seed: int = 13


def kfold(n, k, seed):
    order = np.random.default_rng(seed).permutation(n)
    folds = np.array_split(order, k)
    for i in range(k):
        yield np.concatenate([f for j, f in enumerate(folds) if j != i]).tolist(), folds[i].tolist()


def mean_over_ranks(value):
    t = torch.tensor(float(value))
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


def find_lr(template, loader, start=1e-2, end=1.0):
    model = DDP(copy.deepcopy(template))
    opt = torch.optim.SGD(model.parameters(), lr=start, momentum=0.9)
    factor = (end / start) ** (1 / max(1, len(loader) - 1))
    best, best_lr, smooth = float("inf"), start, None
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        value = mean_over_ranks(loss.detach())  # otherwise the ranks would pick different rates
        smooth = value if smooth is None else 0.7 * smooth + 0.3 * value
        if smooth < best:
            best, best_lr = smooth, opt.param_groups[0]["lr"]
        if smooth > 4 * best:
            break
        for group in opt.param_groups:
            group["lr"] *= factor
    return best_lr / 2


def fit_fold(template, train, val, lr, s, rank, world):
    model = DDP(copy.deepcopy(template))
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sampler = DistributedSampler(train, seed=s.seed)
    loader = DataLoader(train, s.batch, sampler=sampler)
    for epoch in range(s.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
    own = Subset(val, range(rank, len(val), world))
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in DataLoader(own, 32):
            sums += torch.tensor([nn.functional.mse_loss(model.module(x), y, reduction="sum").item(), y.numel()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(s=Settings()):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    g = torch.Generator().manual_seed(s.seed)
    x = torch.rand(288, 3, generator=g)
    data = TensorDataset(x, (x[:, :1] * 5).sin() + x[:, 1:2] * x[:, 2:])
    torch.manual_seed(s.seed)
    template = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    sweep = DistributedSampler(data, seed=s.seed + 1)
    lr = find_lr(template, DataLoader(data, s.batch, sampler=sweep))
    scores = []
    for i, (tr, va) in enumerate(kfold(len(data), s.k, s.seed)):
        scores.append(fit_fold(template, Subset(data, tr), Subset(data, va), lr, s, rank, world))
        if rank == 0:
            print(f"fold {i}: lr {lr:.4f} mse {scores[-1]:.5f} ({len(va)} held out)")
    if rank == 0:
        print(f"mean {np.mean(scores):.5f} +- {np.std(scores):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
