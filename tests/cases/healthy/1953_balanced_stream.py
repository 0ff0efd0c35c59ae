"""Rare-event detection: class-balanced draws with replacement, a streaming loader with workers, EMA weights for the test."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.08).long()
    x = torch.randn(n, 24, generator=g)
    bump = torch.zeros(24)
    bump[8:14] = 1.3
    return x + y.unsqueeze(1) * bump, y


class BalancedStream(IterableDataset):
    """Draws half of the samples from each class, for a fixed number of draws. Every rank and worker has its own generator."""

    def __init__(self, x, y, draws, seed, rank):
        self.x, self.y, self.draws, self.seed, self.rank = x, y, draws, seed, rank
        self.pools = [(y == c).nonzero().flatten() for c in (0, 1)]
        self.rounds = 0

    def __iter__(self):
        info = get_worker_info()
        wid, workers = (info.id, info.num_workers) if info else (0, 1)
        g = torch.Generator().manual_seed(self.seed + 1009 * self.rank + 101 * wid + 100003 * self.rounds)
        self.rounds += 1  # a persistent worker keeps its copy, so the next pass differs
        for _ in range(self.draws // workers):
            pool = self.pools[int(torch.randint(0, 2, (), generator=g))]
            i = pool[int(torch.randint(0, len(pool), (), generator=g))]
            yield self.x[i] + 0.2 * torch.randn(24, generator=g), self.y[i]


def network():
    return nn.Sequential(
        nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 2)
    )


@torch.no_grad()
def recalls(net, x, y, rank, world):
    net.eval()
    guess = net(x[rank::world]).argmax(1)
    truth = y[rank::world]
    counts = torch.tensor([[((guess == c) & (truth == c)).sum(), (truth == c).sum()] for c in (0, 1)])
    dist.all_reduce(counts)
    return (counts[:, 0] / counts[:, 1]).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--draws", type=int, default=640)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=71)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(network())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.rounds * (args.draws // args.batch_size)
    )
    stream = BalancedStream(*events(2000, 1), draws=args.draws, seed=args.seed, rank=rank)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=2, persistent_workers=True)
    x_test, y_test = events(600, 2)

    for turn in range(args.rounds):
        model.train()
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ema.update_parameters(model.module)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        for b in ema.buffers():  # statistics come from local batches; rank 0's count
            dist.broadcast(b, src=0)
        quiet, event = recalls(ema.module, x_test, y_test, rank, world)
        if rank == 0:
            print(f"round {turn}: loss {total[0] / total[1]:.4f} recall {quiet:.3f} / {event:.3f}", flush=True)
    if rank == 0:
        torch.save(ema.module.state_dict(), "ema.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
