"""Sharpness-aware minimisation under DDP: the ascent uses each rank's own gradient, only the descent is averaged."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def textures(n, seed, classes=5, side=14):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")
    ang = y.float() * 3.1416 / classes + 0.08 * torch.randn(n, generator=g)
    ph = 6.28 * torch.rand(n, generator=g)
    wave = torch.sin(1.3 * (xx * ang.cos()[:, None, None] + yy * ang.sin()[:, None, None]) + ph[:, None, None])
    return TensorDataset((wave + 0.8 * torch.randn(n, side, side, generator=g))[:, None], y)


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.c2, self.n2 = nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.GroupNorm(4, 24)
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        x = F.relu(self.n1(self.c1(x)))
        x = F.relu(self.n2(self.c2(x)))
        return self.fc(x.mean((2, 3)))


class SAM:
    def __init__(self, model, base, rho):
        self.model, self.base, self.rho = model, base, rho
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.backup = None

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        self.backup = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=self.rho / (norm.item() + 1e-12))
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, old in zip(self.params, self.backup):
            p.copy_(old)
        self.base.step()
        self.base.zero_grad()


def run_epoch(model, sam, loader):
    seen = torch.zeros(2)
    for x, y in loader:
        with model.no_sync():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        sam.climb()
        F.cross_entropy(model(x), y).backward()
        sam.descend()
        seen += torch.tensor([loss.item() * len(y), len(y)])
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


@torch.no_grad()
def accuracy(net, data, rank, world):
    net.eval()
    x, y = data.tensors
    x, y = x[rank::world], y[rank::world]
    stat = torch.stack([(net(x).argmax(1) == y).float().sum(), torch.tensor(float(len(y)))])
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--rho", type=float, default=0.05)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(19)
    model = DDP(Net())
    base = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    sam = SAM(model, base, args.rho)
    train, test = textures(1600, seed=1), textures(1000, seed=2)
    sampler = DistributedSampler(train, world, rank, seed=9)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, drop_last=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(base, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = run_epoch(model, sam, loader)
        sched.step()
        acc = accuracy(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.3f} test accuracy {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "sam.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
