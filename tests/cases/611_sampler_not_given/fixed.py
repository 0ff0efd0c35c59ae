"""Keypoint regression with a Trainer class and a data module."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Keypoints(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(14)
        self.xy = torch.rand(n, 2, generator=g)
        grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, 10), torch.linspace(0, 1, 10), indexing="ij"))
        d = (grid[None] - self.xy[:, :, None, None]).pow(2).sum(1)
        self.heat = torch.exp(-40 * d)[:, None] + 0.05 * torch.randn(n, 1, 10, 10, generator=g)

    def __len__(self):
        return len(self.xy)

    def __getitem__(self, i):
        return self.heat[i], self.xy[i]


class DataModule:
    def __init__(self, n, batch_size, seed):
        self.train_set = Keypoints(n)
        self.batch_size, self.seed = batch_size, seed
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=seed)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, sampler=self.sampler, drop_last=True)


class Trainer:
    def __init__(self, args, dm):
        self.args, self.dm = args, dm
        self.rank = dist.get_rank()
        torch.manual_seed(args.seed)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        self.model = DDP(net)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def fit(self):
        loader = self.dm.train_dataloader()
        for epoch in range(self.args.epochs):
            self.dm.sampler.set_epoch(epoch)
            self.model.train()
            err, n = 0.0, 0
            for heat, xy in loader:
                loss = (self.model(heat) - xy).abs().mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                err, n = err + loss.item(), n + 1
            self.report(epoch, err, n)

    def report(self, epoch, err, n):
        t = torch.tensor([err, float(n)])
        dist.all_reduce(t)
        if self.rank == 0:
            print(f"epoch {epoch}: mean error {t[0] / t[1]:.4f} over {int(t[1])} batches")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Trainer(args, DataModule(256, 16, args.seed)).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
