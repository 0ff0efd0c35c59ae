"""Regression where the learning rate is lowered when validation stalls."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def waves(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 2, generator=g) - 2
    y = torch.sin(2 * x[:, :1]) * torch.cos(x[:, 1:]) + 0.3 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


class Experiment:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.rank = int(os.environ["RANK"])
        self.model = DDP(nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.plateau = ReduceLROnPlateau(self.opt, factor=0.5, patience=0, threshold=0.02)
        train, val = waves(256, 1), waves(48, 2)
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, batch_size=16, sampler=self.sampler)
        self.val_loader = DataLoader(val, batch_size=24, sampler=DistributedSampler(val, shuffle=False))

    def train(self):
        self.model.train()
        for x, y in self.train_loader:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        acc = torch.zeros(2)
        for x, y in self.val_loader:
            acc[0] += nn.functional.mse_loss(self.model(x), y, reduction="sum")
            acc[1] += len(x)
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.train()
            val = self.validate()
            self.plateau.step(val)
            if self.rank == 0:
                print(f"epoch {epoch}: val {val:.4f}, lr {self.opt.param_groups[0]['lr']:.2e}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Experiment(args).run(args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
