"""Snapshot ensemble: cyclic learning rate, one copy of the network at the end of each cycle."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def board(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 2, generator=g)
    return TensorDataset(x - 1, (x.floor().sum(1) % 2).long())


@torch.no_grad()
def ensemble_accuracy(members, loader):
    hits = torch.zeros(2)
    for x, y in loader:
        vote = sum(member(x).softmax(1) for member in members)
        hits += torch.tensor([(vote.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--cycles", type=int, default=3)
    ap.add_argument("--epochs-per-cycle", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    train_set, test_set = board(320, 1), board(101, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=20, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=10)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = CosineAnnealingWarmRestarts(opt, T_0=args.epochs_per_cycle * len(loader))
    snapshots = []
    for epoch in range(args.cycles * args.epochs_per_cycle):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if (epoch + 1) % args.epochs_per_cycle == 0:
            snapshots.append(copy.deepcopy(net).eval().requires_grad_(False))
            acc = ensemble_accuracy(snapshots, test_loader)
            if rank == 0:
                print(f"epoch {epoch}: {len(snapshots)} members, accuracy {acc:.3f}", flush=True)
    if rank == 0:
        torch.save([s.state_dict() for s in snapshots], "snapshots.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
