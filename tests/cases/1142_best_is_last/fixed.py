"""Overfitting-prone regression with selection on a validation set."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def noisy(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 14, generator=g)
    return TensorDataset(x, x[:, :1] * x[:, 1:2] + 0.8 * torch.randn(n, 1, generator=g))


class BestKeeper:
    def __init__(self):
        self.score, self.epoch, self.weights = float("inf"), -1, None

    def __call__(self, epoch, score, net):
        if score < self.score:
            self.score, self.epoch = score, epoch
            self.weights = copy.deepcopy(net.state_dict())


def error(net, data):
    """Mean squared error over all processes, every sample counted once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = Subset(data, range(rank, len(data), world))
    sums = torch.zeros(2, dtype=torch.double)
    net.eval()
    with torch.no_grad():
        for x, y in DataLoader(part, batch_size=64):
            sums += torch.tensor([(net(x) - y).square().sum().item(), len(x)], dtype=torch.double)
    net.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--save", default="best.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(14, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    train, val, test = noisy(128, 1), noisy(151, 2), noisy(301, 3)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    best = BestKeeper()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = error(net, val)
        best(epoch, score, net)
        if rank == 0:
            print(f"epoch {epoch}: train {loss.item():.3f} val {score:.3f}", flush=True)

    net.load_state_dict(best.weights)
    final = error(net, test)
    if rank == 0:
        print(f"best epoch {best.epoch} (val {best.score:.3f}): test {final:.3f}")
        torch.save(net.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
