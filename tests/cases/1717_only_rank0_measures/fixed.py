"""Student learns from a fixed teacher; agreement is measured after every epoch."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def inputs(n, seed):
    return TensorDataset(torch.randn(n, 12, generator=torch.Generator().manual_seed(seed)))


class Distiller:
    def __init__(self, temperature):
        torch.manual_seed(13)
        self.temperature = temperature
        self.teacher = mlp(12, 128, 128, 4).eval().requires_grad_(False)
        self.student = DistributedDataParallel(mlp(12, 24, 4))
        self.optimizer = torch.optim.Adam(self.student.parameters(), lr=5e-3)

    def step(self, x):
        t = self.temperature
        teacher = F.softmax(20 * self.teacher(x) / t, dim=1)
        loss = F.kl_div(F.log_softmax(self.student(x) / t, dim=1), teacher, reduction="batchmean") * t * t
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def agreement(self, loader):
        net = self.student.module
        same = torch.zeros(2)
        for (x,) in loader:
            same += torch.tensor([(net(x).argmax(1) == self.teacher(x).argmax(1)).sum().item(), len(x)])
        dist.all_reduce(same)
        return (same[0] / same[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--temperature", type=float, default=2.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    distiller = Distiller(args.temperature)
    train, held_out = inputs(320, 1), inputs(90, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    held_loader = DataLoader(Subset(held_out, range(rank, len(held_out), world)), batch_size=15)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            distiller.step(x)
        value = distiller.agreement(held_loader)
        if rank == 0:
            print(f"epoch {epoch}: agrees with the teacher in {100 * value:.1f}%", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
