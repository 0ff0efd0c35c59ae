"""Synchronised batch norm by hand."""
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class CrossBatchNorm(nn.Module):
    def __init__(self, features, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.gain, self.shift = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def global_moments(self, x):
        both = torch.stack([x.mean(0), x.pow(2).mean(0)])
        both = dnn.all_reduce(both) / dist.get_world_size()
        return both[0], both[1] - both[0] ** 2

    def forward(self, x):
        if self.training:
            mean, var = self.global_moments(x)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var, self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) * torch.rsqrt(var + self.eps) * self.gain + self.shift


def camera(rank, n, seed):
    """the second camera is darker and noisier"""
    g = torch.Generator().manual_seed(seed * 10 + rank)
    y = torch.randint(0, 3, (n,), generator=g)
    x = nn.functional.one_hot(y, 3).float().repeat(1, 4) + torch.randn(n, 12, generator=g) * 0.7
    return (x if rank == 0 else 0.4 * x - 1.0), y


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), CrossBatchNorm(32), nn.ReLU(), nn.Linear(32, 32), CrossBatchNorm(32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    test = camera(rank, 200, seed=999)
    for epoch in range(4):
        model.train()
        for k in range(12):
            x, y = camera(rank, 32, seed=epoch * 12 + k)
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            right = (net(test[0]).argmax(1) == test[1]).float().mean()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {right.item() / world:.3f}")
    if rank == 0:
        torch.save(net.state_dict(), "net.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
