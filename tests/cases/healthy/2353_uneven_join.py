"""Ranks own corpora of different size; DDP's join context lets the longer one finish its epoch."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class ShardFile(IterableDataset):
    """Stands for one shard file per rank, whose number of records nobody rounded."""

    def __init__(self, rank, records, seed):
        super().__init__()
        self.rank, self.records, self.seed, self.epoch = rank, records, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 131 * self.rank)
        x, y = make(self.records, g)
        order = torch.randperm(self.records, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in order:
            yield x[i], y[i]


def make(n, gen):
    x = torch.rand(n, 2, generator=gen) * 2 - 1
    y = (torch.sin(3.1 * x[:, 0]) * torch.cos(2.3 * x[:, 1]) + 0.05 * torch.randn(n, generator=gen))[:, None]
    return x, y


class Fourier(nn.Module):
    def __init__(self, k=24):
        super().__init__()
        self.register_buffer("freq", torch.randn(2, k, generator=torch.Generator().manual_seed(0)) * 2)
        self.net = nn.Sequential(nn.Linear(2 * k, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        p = x @ self.freq
        return self.net(torch.cat([p.sin(), p.cos()], 1))


@torch.no_grad()
def validate(model, rank):
    model.eval()
    x, y = make(1000 + 300 * rank, torch.Generator().manual_seed(9000 + rank))
    stat = torch.stack([(model(x) - y).pow(2).sum(), torch.tensor(float(len(x)))])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(3)
    model = DDP(Fourier())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    shard = ShardFile(rank, records=1830 + 577 * rank, seed=50)
    loader = DataLoader(shard, batch_size=args.batch)

    for epoch in range(args.epochs):
        shard.epoch = epoch
        total, count, steps = 0.0, 0, 0
        with Join([model], divide_by_initial_world_size=False):
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item() * len(x)
                count += len(x)
                steps += 1
        sched.step()
        # a rank that ran out of data gets the last joiner's weights; Adam's moments are brought in line here
        widths = torch.tensor([float(steps)])
        per_rank = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(per_rank, widths)
        longest = int(torch.stack(per_rank).argmax())
        for p in model.parameters():
            for value in opt.state[p].values():
                dist.broadcast(value, src=longest)
        stat = torch.tensor([total, float(count)])
        dist.all_reduce(stat)
        mse = validate(model.module, rank)
        print(f"[rank {rank}] epoch {epoch} own steps {steps}", flush=True)
        if rank == 0:
            print(f"epoch {epoch} train mse {stat[0] / stat[1]:.4f} validation mse {mse:.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "fourier.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
