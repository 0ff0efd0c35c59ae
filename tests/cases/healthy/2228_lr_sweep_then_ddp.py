"""Population-based search inside one job, then all ranks train the winner together."""
import copy
import json
import random
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

POPULATION, GENERATIONS, STEPS_PER_GENERATION, FINAL_EPOCHS = 4, 4, 20, 3


def dataset(n, seed):
    g = torch.Generator().manual_seed(17)
    w1, w2 = torch.randn(16, 12, generator=g), torch.randn(12, 1, generator=g)
    g.manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, torch.tanh(x @ w1 * 0.5) @ w2 + 0.1 * torch.randn(n, 1, generator=g))


def network():
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Dropout(0.05), nn.Linear(48, 1))


@torch.no_grad()
def shared_score(model, data, rank, world):
    model.eval()
    x, y = (t[rank::world] for t in data.tensors)
    s = torch.tensor([F.mse_loss(model(x), y, reduction="sum").item(), float(len(x))])
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def joint(model, lr, train, rank, world, epochs=3, teacher=None):
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=lr)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            if teacher is not None:
                with torch.no_grad():
                    y = 0.5 * y + 0.5 * torch.stack([t(x) for t in teacher]).mean(0)
            loss = F.mse_loss(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def alone(model, lr, train, valid, steps, seed, plateau=False):
    """no gradient is shared: every rank has a model of its own here"""
    x, y = train.tensors
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2) if plateau else None
    for step in range(steps):
        model.train()
        ids = torch.randint(len(x), (32,), generator=draws)
        loss = F.mse_loss(model(x[ids]), y[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None and step % 10 == 9:
            model.eval()
            with torch.no_grad():
                schedule.step(F.mse_loss(model(valid.tensors[0]), valid.tensors[1]).item())
    model.eval()
    with torch.no_grad():
        return F.mse_loss(model(valid.tensors[0]), valid.tensors[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = dataset(1024, 1), dataset(333, 2)
    torch.manual_seed(3)
    start = network().state_dict()
    mine = []
    for k in range(2):
        lr = [1e-4, 1e-3, 3e-3, 1e-2][rank + 2 * k]
        model = network()
        model.load_state_dict(start)
        mine.append((alone(model, lr, train, valid, 30, 5), lr))
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    lr = min(pair for part in everyone for pair in part)[1]
    model = network()
    model.load_state_dict(start)
    joint(model, lr, train, rank, world)
    score = shared_score(model, valid, rank, world)
    if rank == 0:
        print(f"score {score:.4f}")
        torch.save(model.state_dict(), "final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
