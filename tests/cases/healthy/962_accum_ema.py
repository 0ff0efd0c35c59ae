"""Accumulation over 4 micro-batches with a short last window, clipping, EMA weights swapped in for the evaluation."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4


class Ema:
    def __init__(self, net, decay=0.9):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in net.named_parameters()}

    @torch.no_grad()
    def update(self, net):
        for n, p in net.named_parameters():
            self.shadow[n].mul_(self.decay).add_(p, alpha=1 - self.decay)

    @contextlib.contextmanager
    def applied(self, net):
        live = {n: p.detach().clone() for n, p in net.named_parameters()}
        with torch.no_grad():
            for n, p in net.named_parameters():
                p.copy_(self.shadow[n])
        try:
            yield
        finally:
            with torch.no_grad():
                for n, p in net.named_parameters():
                    p.copy_(live[n])


def pictures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    x = 0.7 * torch.randn(n, 1, 10, 10, generator=g)
    for i, c in enumerate(y.tolist()):
        x[i, 0, 2 * c : 2 * c + 2] += 1.0
    return TensorDataset(x, y)


@torch.no_grad()
def accuracy(net, data, rank, world):
    net.eval()
    right = torch.zeros(1)
    for i in range(rank, len(data), world):
        x, y = data[i]
        right += (net(x.unsqueeze(0)).argmax(1) == y).float()
    dist.all_reduce(right)
    net.train()
    return right.item() / len(data)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(300, 5))
    model = DDP(net)
    ema = Ema(net)
    train, test = pictures(300, 1), pictures(101, 2)
    sampler = DistributedSampler(train, seed=11)
    loader = DataLoader(train, batch_size=10, sampler=sampler)  # 15 micro-batches: windows of 4, 4, 4 and 3
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        count = len(loader)
        opt.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % ACCUM == 0 or i + 1 == count
            window = ACCUM if i < count - count % ACCUM else count % ACCUM
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x), y) / window
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
                ema.update(net)
        raw = accuracy(net, test, rank, world)
        with ema.applied(net):
            smooth = accuracy(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {raw:.3f}, with averaged weights {smooth:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
