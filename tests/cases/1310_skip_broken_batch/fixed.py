"""Count regression on sensor rows, a few of which are broken."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class SensorRows(Dataset):
    def __init__(self, n=256, broken=(37, 150, 201)):
        g = torch.Generator().manual_seed(29)
        self.x = torch.rand(n, 9, generator=g)
        self.y = torch.poisson(3 * self.x.mean(1), generator=g)
        for i in broken:
            self.x[i, 4] = math.nan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class RateModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)


def usable(loss):
    bad = (~torch.isfinite(loss.detach())).float()
    dist.all_reduce(bad)
    return bad.item() == 0


def train_epoch(model, loader, opt):
    seen = skipped = 0
    for x, y in loader:
        loss = nn.functional.poisson_nll_loss(model(x), y)
        if not usable(loss):
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += 1
    return torch.tensor([float(seen), float(skipped)])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(RateModel())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = SensorRows()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        counts = train_epoch(model, loader, opt)
        dist.barrier()
        if rank == 0:
            print(f"epoch {epoch}: {int(counts[0])} updates, {int(counts[1])} batches skipped", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
