"""Mean-teacher regularisation with few labels."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def half_moons(n=288):
    g = torch.Generator().manual_seed(47)
    y = torch.randint(0, 2, (n,), generator=g)
    a = 3.1416 * torch.rand(n, generator=g)
    x = torch.stack([a.cos() + y, torch.where(y == 0, a.sin(), 0.4 - a.sin())], 1)
    known = torch.rand(n, generator=g) < 0.4
    return TensorDataset(x + 0.1 * torch.randn(n, 2, generator=g), y, known)


class Teacher:
    def __init__(self, student, momentum):
        self.net = copy.deepcopy(student).requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def update(self, student):
        for t, s in zip(self.net.parameters(), student.parameters()):
            t.lerp_(s, 1 - self.momentum)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--momentum", type=float, default=0.95)
    ap.add_argument("--consistency", type=float, default=2.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(6)

    student = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    teacher = Teacher(student.module, args.momentum)
    opt = torch.optim.Adam(student.parameters(), lr=5e-3)
    data = half_moons()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y, known in loader:
            out = student(x)
            with torch.no_grad():
                target = teacher.net(x).softmax(1)
            loss = args.consistency * (out.softmax(1) - target).pow(2).mean()
            if known.any():
                loss = loss + nn.functional.cross_entropy(out[known], y[known])
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0:
                teacher.update(student.module)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    if rank == 0:
        torch.save(teacher.net.state_dict(), "teacher.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
