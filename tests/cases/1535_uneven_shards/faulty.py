"""Shards of different length, one for each process, with Join."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def shard(rank):
    """The sites delivered different amounts of data."""
    n = 320 - 64 * rank
    g = torch.Generator().manual_seed(70 + rank)
    x = torch.randn(n, 8, generator=g)
    y = torch.sin(x[:, :4]).sum(1, keepdim=True) + 0.2 * x[:, 4:].sum(1, keepdim=True)
    return TensorDataset(x, y + 0.1 * torch.randn(n, 1, generator=g))


class SiteTrainer:
    def __init__(self, args):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.epochs = args.epochs
        self.model = DDP(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr)
        order = torch.Generator().manual_seed(500 + self.rank)
        self.loader = DataLoader(shard(self.rank), batch_size=16, shuffle=True, generator=order)

    def epoch(self):
        stats = torch.zeros(2)
        with Join([self.model]):
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                stats += torch.tensor([shown.item() / self.world, 1.0])
        return (stats[0] / stats[1]).item()

    def run(self):
        for epoch in range(self.epochs):
            mse = self.epoch()
            if self.rank == 0:
                print(f"epoch {epoch}: mse {mse:.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    SiteTrainer(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
