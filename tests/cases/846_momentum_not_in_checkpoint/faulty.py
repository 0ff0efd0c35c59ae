"""Preemptible job: stop after some epochs, start again from the file."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def wine(n=300):
    g = torch.Generator().manual_seed(99)
    y = torch.randint(0, 3, (n,), generator=g)
    profile = torch.randn(3, 9, generator=g)
    return TensorDataset(profile[y] + 1.1 * torch.randn(n, 9, generator=g), y)


class Run:
    def __init__(self, args, rank):
        torch.manual_seed(3)
        self.args, self.rank, self.epoch = args, rank, 0
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 3)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.sampler = DistributedSampler(wine(), shuffle=True)
        self.loader = DataLoader(self.sampler.dataset, batch_size=15, sampler=self.sampler)
        if os.path.exists(args.file):
            self.restore()

    def save(self):
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "epoch": self.epoch}
            torch.save(state, self.args.file)
        dist.barrier()

    def restore(self):
        state = torch.load(self.args.file, map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.epoch = state["epoch"]

    def train(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            if self.rank == 0:
                print(f"epoch {self.epoch}: loss {loss.item():.4f}", flush=True)
            self.epoch += 1
        self.save()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--file", default="wine.pt")
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    Run(args, rank).train(until=3)
    Run(args, rank).train(until=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
