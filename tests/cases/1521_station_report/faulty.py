"""Forecast model with an error report per weather station."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

STATIONS = ["coast", "harbour", "ridge", "valley"]


class Readings(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.station = torch.randint(0, len(STATIONS), (n,), generator=g)
        self.x = torch.randn(n, 6, generator=g)
        level = torch.tensor([0.0, 1.0, -1.0, 2.0])[self.station]
        spread = torch.tensor([0.1, 0.4, 0.8, 1.6])[self.station]
        self.y = self.x[:, :3].sum(1) + level + spread * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.station[i], self.y[i]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Embedding(len(STATIONS), 4)
        self.body = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x, station):
        return self.body(torch.cat([x, self.place(station)], 1)).squeeze(1)


@torch.no_grad()
def station_report(net, data, rank, world):
    net.eval()
    sums = {}
    for x, station, y in DataLoader(Subset(data, range(rank, len(data), world)), batch_size=20):
        miss = (net(x, station) - y).abs()
        for s, e in zip(station.tolist(), miss.tolist()):
            entry = sums.setdefault(STATIONS[s], [0.0, 0.0])
            entry[0] += e
            entry[1] += 1.0
    report = {}
    for name in sums:
        total = torch.tensor(sums[name], dtype=torch.float64)
        dist.all_reduce(total)
        report[name] = (total[0] / total[1]).item()
    net.train()
    return report


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)

    model = DDP(Forecaster())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train, val = Readings(512, 1), Readings(120, 5)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, station, y in loader:
            loss = nn.functional.mse_loss(model(x, station), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        report = station_report(model.module, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{k} {report[k]:.3f}" for k in STATIONS), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
