"""K-fold cross-validation of a small classifier, every fold trained in parallel."""
import argparse
import copy
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def patients(n=300):
    g = torch.Generator().manual_seed(14)
    x = torch.randn(n, 9, generator=g)
    risk = 1.5 * x[:, 0] - x[:, 3] + x[:, 1] * x[:, 2]
    return TensorDataset(x, (risk > 0).long())


def fold_indices(n, folds):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(6)).tolist()
    for k in range(folds):
        held_out = order[k::folds]
        rest = sorted(set(order) - set(held_out))
        yield rest, held_out


@torch.no_grad()
def accuracy(network, subset, rank, world):
    mine = list(range(rank, len(subset), world))
    counts = torch.zeros(2)
    for x, y in DataLoader(Subset(subset, mine), batch_size=64):
        counts[0] += (network(x).argmax(1) == y).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def train_fold(template, subset, epochs, lr):
    network = copy.deepcopy(template)
    model = DDP(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    sampler = DistributedSampler(subset)
    loader = DataLoader(subset, batch_size=20, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return network, loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folds", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    template = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    data, results = patients(), []
    for k, (rest, held_out) in enumerate(fold_indices(len(data), args.folds)):
        network, loss = train_fold(template, Subset(data, rest), args.epochs, args.lr)
        results.append(accuracy(network.eval(), Subset(data, held_out), rank, world))
        if rank == 0:
            print(f"fold {k}: last loss {loss:.4f}, accuracy {results[-1]:.3f}", flush=True)
    if rank == 0:
        print(f"mean accuracy {statistics.mean(results):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
