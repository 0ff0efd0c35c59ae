"""Exponential moving average with a swap for validation."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class WeightAverage:
    def __init__(self, net, decay=0.97):
        self.params, self.decay = list(net.parameters()), decay
        self.shadow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, self.params):
            s.lerp_(p, 1 - self.decay)

    @contextlib.contextmanager
    def applied(self):
        backup = [p.data.clone() for p in self.params]
        with torch.no_grad():
            for p, s in zip(self.params, self.shadow):
                p.copy_(s)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, b in zip(self.params, backup):
                    p.copy_(b)


def shard(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=g) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:] ** 2


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    total = torch.stack([nn.functional.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)))])
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 1))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = WeightAverage(net)
    train, val = shard(960, 10 + rank), shard(200, 20 + rank)
    gen = torch.Generator().manual_seed(rank)
    for step in range(60):
        idx = torch.randint(0, 960, (48,), generator=gen)
        loss = nn.functional.mse_loss(model(train[0][idx]), train[1][idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        average.update()
        if step % 12 == 11:
            plain = validate(net, *val)
            with average.applied():
                smooth = validate(net, *val)
            if rank == 0:
                print(f"step {step + 1}: plain {plain:.4f} averaged {smooth:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
