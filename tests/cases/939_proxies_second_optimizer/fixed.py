"""Metric learning with proxies (one per class); embedding and proxies have different learning rates."""
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = SimpleNamespace(
    epochs=3,
    batch=16,
    embed=SimpleNamespace(dim=8, lr=2e-3),
    loss=SimpleNamespace(kind="proxy_anchor", margin=0.1, alpha=8.0, lr=2e-2),
    classes=6,
)


def norm(x):
    return F.normalize(x, dim=-1)


class PairLoss(nn.Module):
    """Parameter-free alternative."""

    def forward(self, z, y):
        sim = norm(z) @ norm(z).t()
        same = y[:, None] == y[None]
        return (sim.masked_fill(same, 0).relu().mean() - sim.masked_fill(~same, 0).mean()) + 1


class ProxyAnchor(nn.Module):
    def __init__(self, classes, dim, margin, alpha):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(classes, dim) / dim**0.5)
        self.margin, self.alpha = margin, alpha

    def forward(self, z, y):
        sim = norm(z) @ norm(self.centres).t()
        hot = F.one_hot(y, len(self.centres)).bool()
        pos = torch.exp(-self.alpha * (sim - self.margin)).masked_fill(~hot, 0).sum(0)
        neg = torch.exp(self.alpha * (sim + self.margin)).masked_fill(hot, 0).sum(0)
        return torch.log1p(pos).mean() + torch.log1p(neg).mean()


LOSSES = {
    "pair": lambda c: PairLoss(),
    "proxy_anchor": lambda c: ProxyAnchor(c.classes, c.embed.dim, c.loss.margin, c.loss.alpha),
}


def build(config):
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, config.embed.dim))
    criterion = LOSSES[config.loss.kind](config)
    optimizers = [torch.optim.Adam(net.parameters(), lr=config.embed.lr)]
    net = DistributedDataParallel(net)
    extra = list(criterion.parameters())
    if extra:
        optimizers.append(torch.optim.Adam(extra, lr=config.loss.lr))
        criterion = DistributedDataParallel(criterion)
    return net, criterion, optimizers


def animals(classes, n=480):
    gen = torch.Generator().manual_seed(12)
    y = torch.randint(0, classes, (n,), generator=gen)
    means = torch.randn(classes, 10, generator=gen) * 1.5
    return TensorDataset(means[y] + torch.randn(n, 10, generator=gen), y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net, criterion, optimizers = build(CONFIG)
    data = animals(CONFIG.classes)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=CONFIG.batch, sampler=sampler, drop_last=True)
    for epoch in range(CONFIG.epochs):
        sampler.set_epoch(epoch)
        mean = torch.zeros(())
        for x, y in loader:
            for o in optimizers:
                o.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            for o in optimizers:
                o.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: proxy loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
