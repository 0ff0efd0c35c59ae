"""Distillation: rank 0 trains the teacher alone on all data, sends it to everybody, then all train the student."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + 2.0944 * y + 0.15 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1) * 2, y)


def mlp(width, depth):
    layers, last = [], 2
    for _ in range(depth):
        layers += [nn.Linear(last, width), nn.ReLU()]
        last = width
    return nn.Sequential(*layers, nn.Linear(last, 3))


def train_teacher(teacher, data):
    opt = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    loader = DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    for epoch in range(8):
        for x, y in loader:
            loss = F.cross_entropy(teacher(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    print(f"teacher: last loss {loss.item():.3f}")


@torch.no_grad()
def accuracy(model, data):
    x, y = data.tensors
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, test = spirals(512, 1), spirals(300, 2)
    torch.manual_seed(1 + rank)
    teacher = mlp(96, 3)
    if rank == 0:
        train_teacher(teacher, train)
    for p in teacher.parameters():
        dist.broadcast(p.data, src=0)
    teacher.requires_grad_(False).eval()

    student = DDP(mlp(24, 2))  # weights come from rank 0
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    opt = torch.optim.Adam(student.parameters(), lr=5e-3)
    temperature = 3.0
    for epoch in range(6):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for x, y in loader:
            with torch.no_grad():
                soft = F.softmax(teacher(x) / temperature, dim=1)
            out = student(x)
            kd = F.kl_div(F.log_softmax(out / temperature, 1), soft, reduction="batchmean") * temperature**2
            loss = 0.7 * kd + 0.3 * F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter += torch.stack([loss.detach() * len(y), torch.tensor(float(len(y)))])
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: loss {(meter[0] / meter[1]).item():.4f}")
    if rank == 0:
        print(f"teacher {accuracy(teacher, test):.3f} student {accuracy(student.module, test):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
