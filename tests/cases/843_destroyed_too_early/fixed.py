"""Train, then report the test error of all ranks together."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def lenses(n, seed):
    g = torch.Generator().manual_seed(seed)
    f, d = 1 + torch.rand(n, 1, generator=g), 3 + torch.rand(n, 1, generator=g)
    return TensorDataset(torch.cat([f, d], 1), 1 / (1 / f - 1 / d))


def train(model, data, epochs, rank):
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def mean_error(net, data, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    err = torch.tensor([(net(x) - y).abs().sum().item(), float(len(x))])
    dist.all_reduce(err)
    return (err[0] / err[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    train(DDP(net), lenses(256, 1), args.epochs, rank)
    err = mean_error(net, lenses(99, 2), rank, world)
    if rank == 0:
        print(f"test error {err:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
