"""Learning-rate range test, then DDP training."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def waves(n=256):
    g = torch.Generator().manual_seed(26)
    x = 6 * torch.rand(n, 1, generator=g) - 3
    return TensorDataset(x, torch.sin(2 * x) * x + 0.05 * torch.randn(n, 1, generator=g))


def find_lr(net, data, candidates, steps=12):
    """Loss after a few steps for each candidate; the network itself is not touched."""
    scores = {}
    x, y = data.tensors
    for lr in candidates:
        trial = copy.deepcopy(net)
        opt = torch.optim.SGD(trial.parameters(), lr=lr)
        for _ in range(steps):
            loss = nn.functional.mse_loss(trial(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        scores[lr] = loss.item() if loss.isfinite() else float("inf")
    return min(scores, key=scores.get)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--no-lr-search", dest="search", action="store_false")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    data = waves()
    lr = args.lr
    if args.search and rank == 0:
        lr = find_lr(net, data, [0.02, 0.05, 0.1])
        print(f"learning rate {lr}")
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
