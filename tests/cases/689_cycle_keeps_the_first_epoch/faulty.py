"""Step-based training from an endless iterator over a sharded loader."""
import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_loader(data, batch):
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, shuffle=True), drop_last=True)


def endless(loader):
    """Batches without end, reshuffled every time the data are through."""
    def epochs():
        for epoch in itertools.count():
            loader.sampler.set_epoch(epoch)
            yield from loader
    return epochs()


def infinite(loader):
    loader.sampler.set_epoch(0)
    return itertools.cycle(loader)


class PointNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, clouds):
        return self.head(self.point(clouds).amax(1))


def clouds(n):
    g = torch.Generator().manual_seed(35)
    y = torch.randint(0, 3, (n,), generator=g)
    p = torch.randn(n, 40, 3, generator=g)
    sphere = p / p.norm(dim=2, keepdim=True)
    cube = p / p.abs().amax(2, keepdim=True)
    disc = sphere * torch.tensor([1.0, 1.0, 0.1])
    return TensorDataset(torch.stack([sphere, cube, disc], 1)[torch.arange(n), y] + 0.05 * torch.randn(n, 40, 3, generator=g), y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--report", type=int, default=15)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(66)
    model = DDP(PointNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    batches = infinite(make_loader(clouds(384), args.batch))
    stat = torch.zeros(3)
    for step in range(1, args.steps + 1):
        x, y = next(batches)
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stat += torch.tensor([loss.item(), float((out.argmax(1) == y).float().mean()), 1.0])
        if step % args.report == 0:
            dist.all_reduce(stat)
            if rank == 0:
                print(f"step {step}: loss {(stat[0] / stat[2]).item():.4f} accuracy {(stat[1] / stat[2]).item():.3f}")
            stat.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
