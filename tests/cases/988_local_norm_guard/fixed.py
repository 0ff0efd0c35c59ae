"""Policy regression with heavy-tailed targets; updates with a spiking gradient are left out."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SpikeGuard:
    """Remembers a slow mean of the gradient norm; says no to steps far above it."""

    def __init__(self, ratio=1.8, decay=0.9):
        self.ratio, self.decay, self.mean = ratio, decay, None
        self.refused = 0

    def accepts(self, grads):
        norm = torch.stack([g.norm() for g in grads]).norm().item()
        if self.mean is None:
            self.mean = norm
        fine = norm <= self.ratio * self.mean
        self.mean = self.decay * self.mean + (1 - self.decay) * min(norm, self.ratio * self.mean)
        self.refused += not fine
        return fine


def average(grads, world):
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat.div_(world)
    for g, mean in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(mean)


def update(net, optimizer, guard, world):
    grads = [p.grad for p in net.parameters()]
    average(grads, world)
    accepted = guard.accepts(grads)
    if accepted:
        optimizer.step()


def demonstrations(n=480):
    gen = torch.Generator().manual_seed(26)
    x = torch.randn(n, 12, generator=gen)
    y = torch.tanh(x[:, :3] + x[:, 3:6])
    tail = torch.rand(n, 1, generator=gen) < 0.03
    return TensorDataset(x, torch.where(tail, y * 8, y))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(71)
    net = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    guard = SpikeGuard()
    data = demonstrations()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            update(net, optimizer, guard, world)
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total[0] / total[1]:.4f}, refused {guard.refused}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
