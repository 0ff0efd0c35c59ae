"""Autoencoder for sensor traces; length of the training is given in steps."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def traces(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 40)
    freq = 1 + 4 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    return TensorDataset(torch.sin(6.28 * freq * t + phase) + 0.05 * torch.randn(n, 40, generator=g))


class AutoEncoder(nn.Module):
    def __init__(self, code=6):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, code))
        self.decode = nn.Sequential(nn.Linear(code, 64), nn.Tanh(), nn.Linear(64, 40))

    def forward(self, x):
        return self.decode(self.encode(x))


@torch.no_grad()
def validate(net, data, rank, world):
    x = data.tensors[0][rank::world]
    total = torch.tensor([(net(x) - x).pow(2).mean(1).sum().item(), float(len(x))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def endless(loader, sampler):
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--eval-every", type=int, default=30)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)

    train_set, val_set = traces(480, 1), traces(120, 2)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(AutoEncoder())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    feed = endless(loader, sampler)
    for step in range(1, args.steps + 1):
        x = next(feed)[0]
        loss = (model(x) - x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % args.eval_every == 0:
            val = validate(model.module, val_set, rank, world)
            if rank == 0:
                print(f"step {step}: train {loss.item():.4f} val {val:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
