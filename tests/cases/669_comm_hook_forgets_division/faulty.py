"""DDP with a home-made bf16 compression hook."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class HookState:
    def __init__(self, group, start_after):
        self.group, self.start_after, self.calls = group, start_after, 0


def compressed(state, bucket):
    """Full precision for the first calls, bfloat16 afterwards."""
    state.calls += 1
    buffer = bucket.buffer()
    if state.calls <= state.start_after:
        work = buffer.div_(dist.get_world_size(state.group))
        return dist.all_reduce(work, group=state.group, async_op=True).get_future().then(lambda f: f.value()[0])
    small = buffer.to(torch.bfloat16)
    fut = dist.all_reduce(small, group=state.group, async_op=True).get_future()

    def back(f):
        buffer.copy_(f.value()[0])
        return buffer

    return fut.then(back)


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.t = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.c = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.t(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.c(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, tokens=9, patch=9, dim=24, classes=5):
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.blocks = nn.Sequential(MixerBlock(tokens, dim), MixerBlock(tokens, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


def patches(n):
    g = torch.Generator().manual_seed(23)
    y = torch.randint(0, 5, (n,), generator=g)
    proto = torch.randn(5, 9, 9, generator=g)
    return TensorDataset(proto[y] + 1.0 * torch.randn(n, 9, 9, generator=g), y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--start-after", type=int, default=8)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(40)
    model = DDP(Mixer())
    model.register_comm_hook(HookState(None, args.start_after), compressed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = patches(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch}: last loss {shown.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
