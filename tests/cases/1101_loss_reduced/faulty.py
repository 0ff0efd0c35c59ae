"""House-price style regression; every process holds its own copy of the network."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Houses(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(5)
        self.features = torch.randn(n, 8, generator=g)
        area, age = self.features[:, 0], self.features[:, 1]
        self.price = (2.0 * area - age.abs() + 0.5 * area * self.features[:, 2]).unsqueeze(1)
        self.price += 0.1 * torch.randn(n, 1, generator=g)

    def __len__(self):
        return len(self.price)

    def __getitem__(self, i):
        return self.features[i], self.price[i]


def average(tensor, world):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor / world


class Trainer:
    def __init__(self, args):
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        for t in self.net.state_dict().values():
            dist.broadcast(t, src=0)
        self.criterion = nn.SmoothL1Loss()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9)
        data = Houses()
        self.sampler = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler)

    def train_step(self, x, y):
        loss = self.criterion(self.net(x), y)
        loss = average(loss, self.world)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            losses = [self.train_step(x, y) for x, y in self.loader]
            if self.rank == 0:
                print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    Trainer(args).fit(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
