"""DiLoCo style: many inner steps on each process alone, then an outer Nesterov step on the averaged difference."""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    x = 0.6 * torch.randn(n, 1, 12, 12, generator=g)
    for k in range(6):
        at = (y == k).nonzero().flatten()
        r, c = divmod(k, 3)
        x[at, 0, 2 + 5 * r : 5 + 5 * r, 1 + 4 * c : 4 + 4 * c] += 1.0
    return x, y


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.g1, self.g2 = nn.GroupNorm(3, 12), nn.GroupNorm(3, 24)
        self.fc = nn.Linear(24 * 9, 6)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.g1(self.c1(x))), 2)
        x = F.max_pool2d(F.relu(self.g2(self.c2(x))), 2)
        return self.fc(x.flatten(1))


class Outer:
    def __init__(self, model, lr=0.7, momentum=0.9):
        self.model = model
        self.anchor = copy.deepcopy(model)
        self.opt = torch.optim.SGD(self.anchor.parameters(), lr=lr, momentum=momentum, nesterov=True)

    def step(self):
        world = dist.get_world_size()
        deltas = torch.cat([(a.detach() - p.detach()).flatten() for a, p in zip(self.anchor.parameters(), self.model.parameters())])
        dist.all_reduce(deltas)
        deltas /= world
        at = 0
        for a in self.anchor.parameters():
            a.grad = deltas[at : at + a.numel()].view_as(a).clone()
            at += a.numel()
        self.opt.step()
        with torch.no_grad():
            for a, p in zip(self.anchor.parameters(), self.model.parameters()):
                p.copy_(a)
        return deltas.norm().item()


@torch.no_grad()
def test(model, x, y, rank, world):
    xs, ys = x[rank::world], y[rank::world]
    ok = torch.tensor([(model(xs).argmax(1) == ys).sum().item(), len(ys)], dtype=torch.float)
    dist.all_reduce(ok)
    return (ok[0] / ok[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--inner", type=int, default=15)
    ap.add_argument("--batch", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_images(1600, 100 + rank)
    tx, ty = make_images(600, 99)
    torch.manual_seed(0)
    model = Small()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    outer = Outer(model)
    gen = torch.Generator().manual_seed(rank)

    for rnd in range(args.rounds):
        mean = 0.0
        for _ in range(args.inner):
            pick = torch.randint(0, len(y), (args.batch,), generator=gen)
            loss = F.cross_entropy(model(x[pick]), y[pick])
            inner.zero_grad()
            loss.backward()
            inner.step()
            mean += loss.item() / args.inner
        size = outer.step()
        stat = torch.tensor([mean])
        dist.all_reduce(stat)
        acc = test(outer.anchor, tx, ty, rank, world)
        if rank == 0:
            print(f"round {rnd} inner loss {stat.item() / world:.4f} |delta| {size:.3f} test {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(outer.anchor.state_dict(), "diloco.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
