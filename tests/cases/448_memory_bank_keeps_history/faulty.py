"""Contrastive learning with a slowly moving key encoder and a bank of negatives."""
import collections
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class MemoryBank:
    def __init__(self, batches):
        self.entries = collections.deque(maxlen=batches)

    def push(self, emb):
        self.entries.append(emb)

    def negatives(self, like):
        if not self.entries:
            return like.new_zeros(0, like.shape[1])
        return torch.cat(list(self.entries)[-8:]).detach()


class Encoder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.proj = nn.Linear(16, dim)

    def forward(self, x):
        return F.normalize(self.proj(self.conv(x).mean((2, 3))), dim=1)


class KeyEncoder:
    def __init__(self, net, momentum=0.9):
        self.net, self.momentum = copy.deepcopy(net), momentum

    def __call__(self, x):
        return self.net(x)

    @torch.no_grad()
    def follow(self, net):
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(theirs, 1 - self.momentum)


def two_views(gen, n):
    colour = torch.rand(n, 3, 1, 1, generator=gen)
    stripes = torch.sin(torch.arange(16) * (1 + 5 * torch.rand(n, 1, 1, 1, generator=gen)))
    base = colour * stripes.expand(n, 1, 16, 16)
    noise = lambda: 0.1 * torch.randn(n, 3, 16, 16, generator=gen)
    return base + noise(), base.flip(2) + noise()


def nce(a, b, bank, t=0.2):
    logits = torch.cat([a @ b.T, a @ bank.T], 1) / t
    return F.cross_entropy(logits, torch.arange(len(a)))


def main(steps=70, batch=24):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = Encoder()
    keys = KeyEncoder(net)
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bank, gen = MemoryBank(batches=200), torch.Generator().manual_seed(rank)
    running = 0.0
    for step in range(1, steps + 1):
        a, b = two_views(gen, batch)
        query, key = model(a), keys(b)
        loss = nce(query, key.detach(), bank.negatives(query))
        opt.zero_grad()
        loss.backward()
        opt.step()
        keys.follow(net)
        bank.push(key)
        running += loss.item()
        if step % 14 == 0:
            shown = torch.tensor(running / 14)
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step}: {shown.item() / dist.get_world_size():.3f}, bank {len(bank.entries)} batches")
            running = 0.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
