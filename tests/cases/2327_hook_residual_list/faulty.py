"""Denoising autoencoder with half-precision gradient exchange through a DDP communication hook."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class HalfExchange:
    """State of the hook: process group plus statistics on the rounding error."""

    def __init__(self, group=None):
        self.group = group if group is not None else dist.group.WORLD
        self.world = self.group.size()
        self.rounding = []
        self.buckets = 0

    def record(self, exact, rounded):
        error = exact - rounded.float()
        self.rounding.append(error)
        self.buckets += 1

    def report(self):
        norms = torch.stack([e.norm() for e in self.rounding])
        return norms.mean().item(), norms.max().item()


def half_exchange_hook(state, bucket):
    buffer = bucket.buffer()
    scaled = buffer / state.world
    packed = scaled.to(torch.float16)
    state.record(scaled, packed)
    work = dist.all_reduce(packed, group=state.group, async_op=True)

    def unpack(fut):
        buffer.copy_(fut.value()[0])
        return buffer

    return work.get_future().then(unpack)


class Autoencoder(nn.Module):
    def __init__(self, dim=256, hidden=512, code=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                     nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                     nn.Linear(hidden, dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def signals(n, seed, dim=256, rank_of_data=10):
    basis = torch.randn(rank_of_data, dim, generator=torch.Generator().manual_seed(55))
    coef = torch.randn(n, rank_of_data, generator=torch.Generator().manual_seed(seed))
    return torch.tanh(coef @ basis / 3)


def corrupt(x, rate, gen):
    keep = torch.rand(x.shape, generator=gen) > rate
    return x * keep


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--mask", type=float, default=0.3)
    ap.add_argument("--seed", type=int, default=9)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = DDP(Autoencoder(), bucket_cap_mb=2)
    state = HalfExchange()
    model.register_comm_hook(state, half_exchange_hook)

    train = TensorDataset(signals(3072, seed=1))
    held = signals(512, seed=2)[rank::world]
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    masks = torch.Generator().manual_seed(args.seed * 100 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began = time.perf_counter()
        totals = torch.zeros(2)
        for (x,) in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(corrupt(x, args.mask, masks)), x)
            loss.backward()
            optimizer.step()
            totals += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(totals)
        model.eval()
        with torch.no_grad():
            err = torch.stack([(model.module(held) - held).pow(2).sum(), torch.tensor(float(held.numel()))])
        model.train()
        dist.all_reduce(err)
        if rank == 0:
            mean, worst = state.report()
            print(f"epoch {epoch} train {totals[0] / totals[1]:.5f} held-out {err[0] / err[1]:.5f} "
                  f"rounding mean {mean:.2e} max {worst:.2e} ({time.perf_counter() - began:.1f}s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
