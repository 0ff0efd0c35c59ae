"""ZeRO-1 optimizer with uneven shards of a tabular log under Join; optimizer state consolidated for saving."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def rides(n=3000):
    g = torch.Generator().manual_seed(55)
    hour = torch.rand(n, generator=g) * 24
    dist_km = torch.rand(n, generator=g) * 15
    rain = (torch.rand(n, generator=g) < 0.3).float()
    zone = torch.randint(0, 9, (n,), generator=g)
    y = 3 + 1.4 * dist_km + 4 * rain + 2 * torch.sin(hour / 24 * 6.283) + 0.5 * zone + torch.randn(n, generator=g)
    num = torch.stack([torch.sin(hour / 24 * 6.283), torch.cos(hour / 24 * 6.283), dist_km / 15, rain], 1)
    return TensorDataset(num, zone, (y - 16) / 8)


class FareNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.zone = nn.Embedding(9, 6)
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, num, zone):
        return self.net(torch.cat([num, self.zone(zone)], 1)).squeeze(1)


def shard_of(rank, world, data):
    """Nine log files are dealt out to the hosts: unequal numbers of rows per process."""
    rows = [i for i in range(len(data)) if i % 9 % world == rank]
    cut = int(0.85 * len(rows))
    return Subset(data, rows[:cut]), Subset(data, rows[cut:])


@torch.no_grad()
def rmse(model, subset):
    model.eval()
    total = torch.zeros(2)
    for num, zone, y in DataLoader(subset, 128):
        total += torch.tensor([(model(num, zone) - y).square().sum().item(), float(len(y))])
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).sqrt().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = shard_of(rank, world, rides())
    g = torch.Generator().manual_seed(rank)
    loader = DataLoader(train, args.batch_size, shuffle=True, generator=g)
    sizes = [None] * world
    dist.all_gather_object(sizes, len(loader))
    if rank == 0:
        print("batches per process:", sizes, flush=True)

    torch.manual_seed(0)
    model = DDP(FareNet())
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=args.lr)
    for epoch in range(args.epochs):
        if epoch == args.epochs - 1:
            for group in opt.param_groups:
                group["lr"] = args.lr * 0.2
        with Join([model, opt]):
            for num, zone, y in loader:
                loss = nn.functional.huber_loss(model(num, zone), y)
                model.zero_grad()
                loss.backward()
                opt.step()
        err = rmse(model.module, val)
        opt.consolidate_state_dict(to=0)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optim": opt.state_dict(), "epoch": epoch}, "fare.pt")
            print(f"epoch {epoch} val rmse {err:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
