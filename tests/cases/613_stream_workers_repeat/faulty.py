"""Forecasting from a sensor stream read by loader workers."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class SensorStream(IterableDataset):
    """Windows of simulated sensors, one sensor after the other."""

    def __init__(self, sensors, window, rank, world):
        self.sensors, self.window = sensors, window
        self.rank, self.world = rank, world

    def windows(self, sensor):
        g = torch.Generator().manual_seed(9000 + sensor)
        phase, freq = torch.rand(2, generator=g).tolist()
        t = torch.arange(10 * self.window + 1) * (0.1 + 0.2 * freq) + 6 * phase
        series = t.sin() + 0.1 * torch.randn(len(t), generator=g)
        for i in range(0, len(series) - self.window, self.window):
            yield series[i : i + self.window], series[i + self.window]

    def __iter__(self):
        mine = range(self.rank, self.sensors, self.world)
        for sensor in mine:
            yield from self.windows(sensor)


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.lstm(x.unsqueeze(-1))
        return self.out(h[:, -1]).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--sensors", type=int, default=32)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    stream = SensorStream(args.sensors, 12, rank, world)
    loader = DataLoader(stream, batch_size=10, num_workers=args.workers)
    model = DDP(Forecaster())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"pass {epoch}: mse {total[0] / total[1]:.4f}, {int(total[1])} batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
