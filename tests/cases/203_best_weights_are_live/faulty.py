"""Keep the best validation weights in memory, go back to them for the final test."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def noisy_labels(n, seed, flip):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    wrong = torch.rand(n, generator=g) < flip
    return TensorDataset(x, torch.where(wrong, 1 - y, y))


class Run:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 2))
        self.ddp = DDP(self.net)
        self.opt = torch.optim.Adam(self.ddp.parameters(), lr=2e-2)
        self.train_set, self.val_set, self.test_set = noisy_labels(192, 1, 0.25), noisy_labels(100, 2, 0.0), noisy_labels(200, 3, 0.0)
        self.best_acc, self.best_weights, self.best_epoch = -1.0, None, -1

    @torch.no_grad()
    def accuracy(self, dataset):
        """each rank takes every world-th sample; no padding"""
        x, y = (t[self.rank :: self.world] for t in dataset.tensors)
        self.net.eval()
        c = torch.tensor([float((self.net(x).argmax(1) == y).sum()), float(len(y))])
        self.net.train()
        dist.all_reduce(c)
        return (c[0] / c[1]).item()

    def remember(self, acc, epoch):
        if acc > self.best_acc:
            self.best_acc, self.best_epoch = acc, epoch
            self.best_weights = self.net.state_dict()

    def fit(self, epochs):
        sampler = DistributedSampler(self.train_set)
        loader = DataLoader(self.train_set, 16, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = nn.functional.cross_entropy(self.ddp(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            acc = self.accuracy(self.val_set)
            self.remember(acc, epoch)
            if self.rank == 0:
                print(f"epoch {epoch}: val {acc:.3f}")
        self.net.load_state_dict(self.best_weights)
        test = self.accuracy(self.test_set)
        if self.rank == 0:
            print(f"best epoch {self.best_epoch} (val {self.best_acc:.3f}), test {test:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).fit(8)
    dist.destroy_process_group()
