"""Adaptive gradient clipping (NFNets), per output unit, as an optimizer wrapper."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def unit_norm(t):
    return t.norm() if t.dim() < 2 else t.flatten(1).norm(dim=1).view(-1, *[1] * (t.dim() - 1))


class AGC:
    def __init__(self, optimizer, factor=0.05, eps=1e-3, skip=()):
        self.optimizer, self.factor, self.eps, self.skip = optimizer, factor, eps, set(skip)
        self.clipped = 0

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    @torch.no_grad()
    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or p in self.skip:
                    continue
                limit = unit_norm(p).clamp(min=self.eps) * self.factor
                norm = unit_norm(p.grad)
                scale = (limit / norm.clamp(min=1e-6)).clamp(max=1.0)
                self.clipped += int((scale < 1).sum())
                p.grad.mul_(scale)
        self.optimizer.step()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 8, 7, stride=2), nn.GELU(), nn.Conv1d(8, 8, 5, stride=2), nn.GELU(), nn.Flatten())
        self.head = nn.Linear(72, 3)

    def forward(self, x):
        return self.head(self.body(x))


def beats(rank, n=24):
    g = torch.Generator().manual_seed(rank)
    t = torch.arange(48)
    while True:
        y = torch.randint(0, 3, (n,), generator=g)
        centre = 10 + 28 * torch.rand(n, 1, generator=g)
        width = (2.0 + 3 * y).unsqueeze(1)
        x = torch.exp(-(((t - centre) / width) ** 2)) + 0.1 * torch.randn(n, 48, generator=g)
        yield x.unsqueeze(1), y


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = ConvNet()
    model = DDP(net)
    opt = AGC(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), skip=net.head.parameters())
    window = torch.zeros(2)
    for step, (x, y) in zip(range(1, 61), beats(rank)):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        window += torch.tensor([loss.item(), (out.argmax(1) == y).float().mean().item()])
        if step % 20 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print("step {}: loss {:.3f} accuracy {:.3f}".format(step, *(window / 20 / world).tolist()), f"clipped {opt.clipped}")
            window.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
