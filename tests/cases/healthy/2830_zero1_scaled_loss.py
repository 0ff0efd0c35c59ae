import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spectrograms(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    f = torch.arange(16).view(1, 16, 1)
    t = torch.arange(24).view(1, 1, 24)
    slope = (y.view(-1, 1, 1) - 2) * 0.25
    base = 4 + 8 * torch.rand(n, 1, 1, generator=g)
    x = torch.exp(-0.5 * (f - base - slope * (t - 12)) ** 2) + 0.3 * torch.randn(n, 16, 24, generator=g)
    return TensorDataset(x, y)


class AudioNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU())
        self.fc = nn.Linear(16 * 4 * 6, 5)

    def forward(self, x):
        return self.fc(self.conv(x.unsqueeze(1)).flatten(1))


class ShardedSGD:
    """Optimizer state split over the ranks; parameters live in one flat vector."""

    def __init__(self, module, lr, momentum=0.9, weight_decay=1e-4):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = list(module.parameters())
        n = sum(p.numel() for p in self.params)
        pad = -n % self.world
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.params] + [torch.zeros(pad)])
        self.grad = torch.zeros_like(self.flat)
        dist.broadcast(self.flat, 0)
        off = 0
        for p in self.params:
            p.data = self.flat[off:off + p.numel()].view_as(p)
            p.grad = self.grad[off:off + p.numel()].view_as(p)
            off += p.numel()
        size = len(self.flat) // self.world
        self.own = self.flat[self.rank * size:(self.rank + 1) * size]
        self.buf = torch.zeros(size)
        self.g = torch.zeros(size)
        self.lr, self.momentum, self.wd = lr, momentum, weight_decay

    def zero(self):
        self.grad.zero_()

    @torch.no_grad()
    def step(self):
        dist.reduce_scatter_tensor(self.g, self.grad, op=dist.ReduceOp.SUM)
        sq = self.g.pow(2).sum()
        dist.all_reduce(sq)
        self.g.mul_(torch.clamp(1.0 / (sq.sqrt() + 1e-6), max=1.0))
        self.g.add_(self.own, alpha=self.wd)
        self.buf.mul_(self.momentum).add_(self.g)
        new = self.own - self.lr * self.buf
        dist.all_gather_into_tensor(self.flat, new)
        return sq.sqrt().item()


def criterion(logits, y):
    return F.cross_entropy(logits, y, label_smoothing=0.05) / dist.get_world_size()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = AudioNet()
    opt = ShardedSGD(model, lr=0.08)
    train, valid = spectrograms(4096, 1), spectrograms(1024, 2)
    sampler = DistributedSampler(train, world, rank, seed=2)
    loader = DataLoader(train, batch_size=64, sampler=sampler, drop_last=True)
    vloader = DataLoader(valid, batch_size=128, sampler=DistributedSampler(valid, world, rank, shuffle=False))
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        tot = torch.zeros(2)
        for x, y in loader:
            opt.zero()
            loss = criterion(model(x), y)
            loss.backward()
            norm = opt.step()
            tot += torch.tensor([loss.item(), 1.0])
        model.eval()
        c = torch.zeros(2)
        with torch.no_grad():
            for x, y in vloader:
                c += torch.tensor([(model(x).argmax(1) == y).sum().item(), float(len(y))])
        dist.all_reduce(c)
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch} loss {tot[0].item() / (tot[1].item() / world):.4f} acc {(c[0] / c[1]).item():.4f} norm {norm:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
