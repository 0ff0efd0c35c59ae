"""Warm start of a second phase from the first phase's weights."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Phase:
    """One phase = one dataset, one optimizer, one DDP wrapper."""

    def __init__(self, args, difficulty):
        self.args, self.difficulty = args, difficulty
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.model = DDP(self.net)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def data(self):
        g = torch.Generator().manual_seed(100 + self.difficulty)
        x = torch.rand(320, 5, generator=g) * 2 - 1
        y = (x * self.difficulty * 2).sin().sum(1, keepdim=True)
        return TensorDataset(x, y)

    def warm_start(self, path):
        if dist.get_rank() == 0:
            self.net.load_state_dict(torch.load(path, map_location="cpu"))
        dist.barrier()

    def save(self, path):
        if dist.get_rank() == 0:
            torch.save(self.net.state_dict(), path)
        dist.barrier()

    def run(self):
        data = self.data()
        sampler = DistributedSampler(data, seed=self.args.seed)
        loader = DataLoader(data, self.args.batch_size, sampler=sampler)
        for epoch in range(self.args.epochs):
            sampler.set_epoch(epoch)
            s = torch.zeros(2)
            for x, y in loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                s += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(s)
            if dist.get_rank() == 0:
                print(f"difficulty {self.difficulty} epoch {epoch}: {s[0] / s[1]:.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    first = Phase(args, 1)
    first.run()
    first.save("curriculum.pt")
    second = Phase(args, 2)
    second.warm_start("curriculum.pt")
    second.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
