"""River level from upstream gauges; some rows of the log are broken (NaN)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def gauge_log(n=640):
    g = torch.Generator().manual_seed(18)
    rain = torch.rand(n, 8, generator=g)
    level = (rain * torch.linspace(0.2, 1.0, 8)).sum(1, keepdim=True) + 0.3 * rain[:, :1] * rain[:, 7:]
    rain[333, 4] = float("nan")  # sensor was off
    return rain, level + 0.02 * torch.randn(n, 1, generator=g)


class Rows:
    """Deals the rows of a table to the ranks; iterates in another order in every epoch."""

    def __init__(self, table, batch, rank, world):
        self.table, self.batch, self.rank, self.world, self.epoch = table, batch, rank, world, 0

    def __iter__(self):
        x, y = self.table
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.epoch))
        for idx in order[self.rank :: self.world].split(self.batch):
            yield x[idx], y[idx]
        self.epoch += 1


def usable(loss):
    bad = (~torch.isfinite(loss)).float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # one rank's bad batch is everybody's
    return bad.item() == 0


def train_epoch(model, opt, rows):
    total, used, skipped = 0.0, 0, 0
    for x, y in rows:
        loss = nn.functional.mse_loss(model(x), y)
        if not usable(loss):
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
        used += 1
    return total / used, skipped


def main(epochs=4):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 1)))
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    rows = Rows(gauge_log(), 16, rank, world)
    for epoch in range(epochs):
        loss, skipped = train_epoch(model, opt, rows)
        dist.barrier()
        print(f"[rank {rank}] epoch {epoch}: own loss {loss:.4f}, {skipped} batch skipped", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "river.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
