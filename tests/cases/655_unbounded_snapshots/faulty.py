"""Trajectory averaging (last k weights) for a wide regression network."""
import argparse
import collections

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Trajectory:
    """Average of the weights of the last `k` steps."""

    def __init__(self, model, k):
        self.model, self.k = model, k
        self.history = []

    @torch.no_grad()
    def record(self):
        self.history.append([p.detach().clone() for p in self.model.parameters()])

    @torch.no_grad()
    def average(self):
        recent = list(self.history)[-self.k :]
        return [torch.stack(ws).mean(0) for ws in zip(*recent)]


def surfaces(n=400):
    g = torch.Generator().manual_seed(22)
    x = torch.rand(n, 8, generator=g) * 2 - 1
    return TensorDataset(x, (3 * x[:, :1]).cos() * x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=g))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--width", type=int, default=700)
    ap.add_argument("--k", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    trajectory = Trajectory(net, args.k)
    data = surfaces()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            trajectory.record()
            s += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(s)
        if dist.get_rank() == 0:
            drift = sum((a - p).norm() for a, p in zip(trajectory.average(), net.parameters()))
            print(f"epoch {epoch}: mse {s[0] / s[1]:.4f} distance to the average {drift:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
