"""Trainer that keeps the best weights in memory and restores them at the end."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


class WeightKeeper:
    def __init__(self):
        self.value = float("inf")
        self.epoch = None
        self.weights = None

    def update(self, value, epoch, net):
        if value < self.value:
            self.value, self.epoch = value, epoch
            self.weights = net.state_dict()

    def restore(self, net):
        net.load_state_dict(self.weights)


class Trainer:
    def __init__(self, epochs=12, lr=0.02):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epochs = epochs
        g = torch.Generator().manual_seed(7)
        x = torch.randn(160, 20, generator=g)
        y = x[:, :1] - x[:, 1:2] + 1.0 * torch.randn(160, 1, generator=g)
        self.train_set, self.val_set = random_split(TensorDataset(x, y), [96, 64], torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
        self.ddp = DistributedDataParallel(net)
        self.opt = torch.optim.Adam(self.ddp.parameters(), lr=lr)
        self.keeper = WeightKeeper()

    @property
    def net(self):
        return self.ddp.module

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        sums = torch.zeros(2)
        for i in range(self.rank, len(self.val_set), self.world):
            x, y = self.val_set[i]
            sums += torch.tensor([(self.net(x) - y).pow(2).item(), 1.0])
        dist.all_reduce(sums)
        self.net.train()
        return (sums[0] / sums[1]).item()

    def fit(self):
        sampler = DistributedSampler(self.train_set)
        loader = DataLoader(self.train_set, batch_size=12, sampler=sampler)
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.mse_loss(self.ddp(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            val = self.validate()
            self.keeper.update(val, epoch, self.net)
            if self.rank == 0:
                print(f"epoch {epoch}: val mse {val:.4f}", flush=True)
        self.keeper.restore(self.net)
        final = self.validate()
        if self.rank == 0:
            print(f"best epoch {self.keeper.epoch} ({self.keeper.value:.4f}), restored model: {final:.4f}", flush=True)
            torch.save(self.net.state_dict(), "best.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    Trainer().fit()
    dist.barrier()
    dist.destroy_process_group()
