"""Image classifier with repeated augmentation, Lookahead around a hand-written LARS, no DDP wrapper."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler


class Glyphs(Dataset):
    def __init__(self, n, seed, augment, aug_seed=0, classes=6, side=16):
        g = torch.Generator().manual_seed(seed)
        shapes = (torch.rand(classes, side - 4, side - 4, generator=torch.Generator().manual_seed(1)) > 0.5).float()
        self.y = torch.randint(classes, (n,), generator=g)
        self.img = torch.zeros(n, 1, side, side)
        self.img[:, 0, 2:-2, 2:-2] = shapes[self.y]
        self.img += 0.9 * torch.randn(n, 1, side, side, generator=g)
        self.augment, self.gen = augment, torch.Generator().manual_seed(aug_seed)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        img = self.img[i]
        if self.augment:
            dx, dy = (torch.randint(-1, 2, (2,), generator=self.gen)).tolist()
            img = torch.roll(img, (dx, dy), (1, 2)) + 0.2 * torch.randn(img.shape, generator=self.gen)
        return img, self.y[i]


class RepeatedAugSampler(Sampler):
    """Every drawn image appears `repeats` times in a row and so lands on all ranks, each with another augmentation."""

    def __init__(self, n, rank, world, repeats, seed):
        self.n, self.rank, self.world, self.repeats, self.seed, self.epoch = n, rank, world, repeats, seed, 0
        self.count = n // world

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.n, generator=g).repeat_interleave(self.repeats)
        return iter(order[self.rank::self.world][:self.count].tolist())


class LARS:
    def __init__(self, params, lr, momentum=0.9, wd=1e-4, trust=0.02):
        self.params, self.lr, self.momentum, self.wd, self.trust = list(params), lr, momentum, wd, trust
        self.buf = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, b in zip(self.params, self.buf):
            g = p.grad
            if p.ndim > 1:
                g = g + self.wd * p
                wn, gn = p.norm(), g.norm()
                if wn > 0 and gn > 0:
                    g = g * (self.trust * wn / gn)
            else:
                g = 0.02 * g
            b.mul_(self.momentum).add_(g)
            p.add_(b, alpha=-self.lr)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Lookahead:
    def __init__(self, inner, k=6, alpha=0.5):
        self.inner, self.k, self.alpha, self.n = inner, k, alpha, 0
        self.slow = [p.detach().clone() for p in inner.params]

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.n += 1
        if self.n % self.k == 0:
            for slow, p in zip(self.slow, self.inner.params):
                slow.add_(p - slow, alpha=self.alpha)
                p.copy_(slow)


def network(classes=6):
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.GroupNorm(4, 24), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Linear(24 * 16, classes))


def average_gradients(params, world):
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in params:
        p.grad = flat[at:at + p.numel()].view_as(p)
        at += p.numel()


@torch.no_grad()
def evaluate(net, data, rank, world):
    net.eval()
    x, y = data.img[rank::world], data.y[rank::world]
    stat = torch.stack([(net(x).argmax(1) == y).float().sum(), torch.tensor(float(len(y)))])
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=1.0)
    ap.add_argument("--repeats", type=int, default=2)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)
    net = network()
    params = list(net.parameters())
    for p in params:
        dist.broadcast(p.data, src=0)
    train = Glyphs(2400, seed=10, augment=True, aug_seed=300 + rank)
    test = Glyphs(1000, seed=11, augment=False)
    sampler = RepeatedAugSampler(len(train), rank, world, args.repeats, seed=70)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, drop_last=True)
    lars = LARS(params, args.lr)
    opt = Lookahead(lars)
    total, step = args.epochs * len(loader), 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, y in loader:
            lars.lr = args.lr * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / total))
            loss = F.cross_entropy(net(x), y)
            lars.zero_grad()
            loss.backward()
            average_gradients(params, world)
            opt.step()
            step += 1
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        acc = evaluate(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {seen[0] / seen[1]:.4f} test accuracy {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "lars.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
