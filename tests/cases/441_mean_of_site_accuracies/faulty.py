"""Federated-like evaluation: each process validates at its own site."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SITES = [("north", 300, 0.3), ("east", 60, 1.0), ("west", 15, 2.5)]


def patients(n, noise, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    risk = x[:, :3].sum(1) - x[:, 3:6].sum(1) + noise * torch.randn(n, generator=g)
    return x, (risk > 0).float()


class GlobalMean:
    """averages values over all processes"""

    def __init__(self):
        self.values = []

    def add(self, value, n):
        self.values.append((value, n))

    def result(self):
        n = sum(k for _, k in self.values)
        mine = sum(v * k for v, k in self.values) / n
        t = torch.tensor(mine)
        dist.all_reduce(t)
        return t.item() / dist.get_world_size()


@torch.no_grad()
def validate(net, x, y, size=50):
    net.eval()
    accuracy, loss = GlobalMean(), GlobalMean()
    for xb, yb in zip(x.split(size), y.split(size)):
        logit = net(xb).squeeze(1)
        accuracy.add(((logit > 0) == (yb > 0.5)).float().mean().item(), len(yb))
        loss.add(nn.functional.binary_cross_entropy_with_logits(logit, yb).item(), len(yb))
    net.train()
    return accuracy.result(), loss.result()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    name, n, noise = SITES[rank]
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    train_x, train_y = patients(480, noise, 10 + rank)
    val = patients(n, noise, 20 + rank)
    for step in range(1, 41):
        pick = torch.randint(0, 480, (32,), generator=gen)
        loss = nn.functional.binary_cross_entropy_with_logits(model(train_x[pick]).squeeze(1), train_y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            accuracy, vloss = validate(model.module, *val)
            if rank == 0:
                print(f"step {step}: validation accuracy {accuracy:.4f} loss {vloss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
