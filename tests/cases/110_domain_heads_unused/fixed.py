"""One trunk, a head per measuring station; a batch always comes from one station."""
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STATIONS = ["north", "south", "harbour"]


class Readings:
    """Temperature from six sensors; each station has an own calibration."""

    def __init__(self, name, number, rank):
        g = torch.Generator().manual_seed(number)
        self.name = name
        self.weights = torch.randn(6, 1, generator=g)
        self.offset = 3.0 * number
        self.gen = torch.Generator().manual_seed(1000 * (number + 1) + rank)

    def batch(self, n=24):
        x = torch.randn(n, 6, generator=self.gen)
        return x, torch.tanh(x) @ self.weights + self.offset + 0.05 * torch.randn(n, 1, generator=self.gen)


class StationNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(24, 1) for name in STATIONS})

    def forward(self, x, station):
        return self.heads[station](self.trunk(x))


def station_turns(rank):
    """Ranks visit the stations in turn, each with its own start."""
    return itertools.islice(itertools.cycle(range(len(STATIONS))), rank, None)


def train(model, steps, rank):
    sources = [Readings(name, i, rank) for i, name in enumerate(STATIONS)]
    optimizer = torch.optim.SGD(
        [
            {"params": model.module.trunk.parameters(), "lr": 0.02},
            {"params": model.module.heads.parameters(), "lr": 0.05},
        ],
        momentum=0.9,
    )
    per_station = torch.zeros(len(STATIONS), 2)
    for step, turn in zip(range(1, steps + 1), station_turns(rank)):
        source = sources[turn]
        x, y = source.batch()
        loss = nn.functional.smooth_l1_loss(model(x, source.name), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        per_station[turn] += torch.tensor([loss.item(), 1.0])
        if step % 30 == 0:
            dist.all_reduce(per_station)
            if rank == 0:
                means = (per_station[:, 0] / per_station[:, 1]).tolist()
                print(f"step {step}: " + "  ".join(f"{n} {m:.3f}" for n, m in zip(STATIONS, means)))
            per_station.zero_()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(6)
    model = DDP(StationNet(), find_unused_parameters=True)
    train(model, 150, rank)
    if rank == 0:
        torch.save(model.module.state_dict(), "stations.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
