"""Wine-like table: train and validation part come from one table."""
import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


class TableModule:
    def __init__(self, rank, world, args):
        self.rank, self.world, self.args = rank, world, args

    def setup(self):
        g = torch.Generator().manual_seed(1234)
        x = torch.randn(400, 11, generator=g)
        quality = (x[:, :3].sum(1) + 0.8 * torch.randn(400, generator=g)).clamp(-2, 2).round().long() + 2
        table = TensorDataset(x, quality)
        self.train_part, self.val_part = random_split(table, [320, 80])

    def train_loader(self):
        self.sampler = DistributedSampler(self.train_part, shuffle=True, seed=self.args.seed)
        return DataLoader(self.train_part, batch_size=self.args.batch_size, sampler=self.sampler)

    def val_loader(self):
        mine = Subset(self.val_part, range(self.rank, len(self.val_part), self.world))
        return DataLoader(mine, batch_size=20)


class Learner:
    def __init__(self, module, args):
        self.module, self.args = module, args
        self.model = DDP(nn.Sequential(nn.Linear(11, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, weight_decay=1e-4)
        self.history = []

    def fit(self):
        loader, val = self.module.train_loader(), self.module.val_loader()
        for epoch in range(self.args.epochs):
            self.module.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
            self.history.append(self.score(val))

    @torch.no_grad()
    def score(self, loader):
        net = self.model.module.eval()
        hits = torch.zeros(2)
        for x, y in loader:
            hits += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=17)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed + rank)
    module = TableModule(rank, world, args)
    module.setup()
    learner = Learner(module, args)
    learner.fit()
    if rank == 0:
        with open("history.json", "w") as f:
            json.dump(learner.history, f)
        print("validation accuracy:", [round(v, 3) for v in learner.history])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
