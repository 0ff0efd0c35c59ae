"""Four-fold cross validation; each fold starts again with a fresh network, optimizer and loader."""
import os
import statistics
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FOLDS, EPOCHS, SEED = 4, 3, 2024


def table(n=360):
    g = torch.Generator().manual_seed(12)
    x = torch.randn(n, 14, generator=g)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
    return TensorDataset(x, y)


def make_net():
    torch.manual_seed(SEED)  # every fold starts from the same weights, so that folds can be compared
    return nn.Sequential(nn.Linear(14, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 2))


@torch.no_grad()
def evaluate(net, subset, rank, world):
    """Every rank scores its own stride of the held-out fold: no padding, uneven by at most one."""
    net.eval()
    part = Subset(subset, range(rank, len(subset), world))
    hits = torch.zeros(2)
    for x, y in DataLoader(part, batch_size=32):
        hits += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(hits)
    net.train()
    assert int(hits[1]) == len(subset)
    return (hits[0] / hits[1]).item()


def run_fold(fold, data, order, rank, world, outdir):
    size = len(data) // FOLDS
    held = order[fold * size : (fold + 1) * size]
    rest = torch.cat([order[: fold * size], order[(fold + 1) * size :]])
    train, valid = Subset(data, rest.tolist()), Subset(data, held.tolist())
    net = make_net()
    model = DDP(net)
    torch.manual_seed(SEED + 31 * rank + fold)  # dropout differs by rank
    sampler = DistributedSampler(train, seed=SEED)
    loader = DataLoader(train, batch_size=18, sampler=sampler, drop_last=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    best, path = 0.0, os.path.join(outdir, "fold.pt")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        # running statistics are averaged, so that all shards of the fold are judged by one network
        for buf in net.buffers():
            if buf.is_floating_point():
                dist.all_reduce(buf)
                buf /= world
        acc = evaluate(net, valid, rank, world)
        if acc > best:
            best = acc
            if rank == 0:
                torch.save({"fold": fold, "epoch": epoch, "acc": acc, "model": net.state_dict()}, path)  # overwritten by the next fold
    return best


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = table()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED))
    outdir = tempfile.mkdtemp(prefix=f"kfold_rank{rank}_")
    scores = []
    for fold in range(FOLDS):
        scores.append(run_fold(fold, data, order, rank, world, outdir))
        if rank == 0:
            print(f"fold {fold}: best accuracy {scores[-1]:.3f}")
        dist.barrier()
    if rank == 0:
        print(f"mean {statistics.mean(scores):.3f} +- {statistics.stdev(scores):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
