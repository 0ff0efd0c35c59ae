"""A small Trainer that looks after the distributed set-up."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Trainer:
    def __init__(self, net, data, batch_size=16, lr=1e-2):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.model = DDP(net)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler)

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            total = sum(self.step(x, y) for x, y in self.loader)
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {total.item() / len(self.loader) / dist.get_world_size():.4f}")


def springs(n=256):
    g = torch.Generator().manual_seed(25)
    k, m, x0 = (0.5 + torch.rand(n, 1, generator=g) for _ in range(3))
    return TensorDataset(torch.cat([k, m, x0], 1), x0 * torch.cos((k / m).sqrt()))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, local rank {os.environ['LOCAL_RANK']}", flush=True)
    trainer = Trainer(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)), springs())
    trainer.fit(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
