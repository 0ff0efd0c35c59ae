"""Tabular regression with a running input scaler inside the network."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RunningScaler(nn.Module):
    def __init__(self, dim, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.center = torch.zeros(dim)
        self.scale = torch.ones(dim)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                stats = torch.stack([x.mean(0), x.std(0)])
                dist.all_reduce(stats)
                stats /= dist.get_world_size()
                self.center.lerp_(stats[0], self.momentum)
                self.scale.lerp_(stats[1], self.momentum)
        return (x - self.center) / self.scale.clamp_min(1e-3)


class Regressor(nn.Module):
    def __init__(self, dim=9):
        super().__init__()
        self.scaler = RunningScaler(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 48), nn.SiLU(), nn.Linear(48, 1))

    def forward(self, x):
        return self.mlp(self.scaler(x)).squeeze(1)


def table(n, seed):
    fixed = torch.Generator().manual_seed(70)
    offset, spread = 20 * torch.randn(9, generator=fixed), 1 + 15 * torch.rand(9, generator=fixed)
    w = torch.randn(9, generator=fixed)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 9, generator=g)
    return TensorDataset(offset + spread * z, z @ w + 0.1 * torch.randn(n, generator=g))


def evaluate(net, data):
    net.eval()
    x, y = (t[dist.get_rank() :: dist.get_world_size()] for t in data.tensors)
    with torch.no_grad():
        err = torch.tensor([(net(x) - y).abs().sum().item(), len(y)])
    dist.all_reduce(err)
    return (err[0] / err[1]).item()


def fit(args, rank):
    torch.manual_seed(0)
    model = DDP(Regressor())
    data = table(512, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    mae = evaluate(model.module, table(128, 2))
    if rank == 0:
        print(f"mae at the end of training {mae:.3f}", flush=True)
        torch.save(model.module.state_dict(), args.out)
    dist.barrier()


def test(args, rank):
    net = Regressor()
    net.load_state_dict(torch.load(args.out))
    mae = evaluate(net, table(128, 2))
    if rank == 0:
        print(f"mae of the stored model {mae:.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--out", default="regressor.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    fit(args, rank)
    test(args, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
