"""Active learning: the pool is scored in shards with MC dropout, every rank buys the same labels, training goes on with more data."""
import argparse
import csv
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

p = argparse.ArgumentParser(description=__doc__)
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--start", type=int, default=41)
p.add_argument("--buy", type=int, default=48)
p.add_argument("--epochs", type=int, default=6)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--mc", type=int, default=10)
p.add_argument("--lr", type=float, default=4e-3)


def moons(n, seed):
    """four interleaved arcs, rotated into ten dimensions"""
    g = torch.Generator().manual_seed(6)
    lift, _ = torch.linalg.qr(torch.randn(10, 10, generator=g))
    g.manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    a = torch.rand(n, generator=g) * 3.14159
    centre = torch.stack([1.0 * y.float(), 0.45 * (y % 2).float()], 1)
    flip = torch.where(y % 2 == 0, 1.0, -1.0)
    xy = torch.stack([a.cos(), flip * a.sin()], 1) + centre + 0.1 * torch.randn(n, 2, generator=g)
    return TensorDataset(torch.cat([2 * xy, 0.3 * torch.randn(n, 8, generator=g)], 1) @ lift, y)


class BayesianMLP(nn.Sequential):
    def __init__(self, width=64, rate=0.2):
        super().__init__(nn.Linear(10, width), nn.ReLU(), nn.Dropout(rate), nn.Linear(width, width), nn.ReLU(),
                         nn.Dropout(rate), nn.Linear(width, 4))


def fit(ddp, data, labelled, round_index, args):
    subset = Subset(data, labelled)
    sampler = DistributedSampler(subset, seed=round_index)          # an odd set is filled up by one repeated sample
    loader = DataLoader(subset, args.batch, sampler=sampler)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)      # starts over with every round
    ddp.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    final = loss.detach().clone()
    dist.all_reduce(final)
    return final.item() / dist.get_world_size()


@torch.no_grad()
def disagreement(net, x, passes):
    """mutual information between prediction and weights; dropout has to stay on here"""
    net.train()
    probs = torch.stack([net(x).softmax(1) for _ in range(passes)])
    entropy = lambda q: -(q * q.clamp(min=1e-9).log()).sum(-1)
    return entropy(probs.mean(0)) - entropy(probs).mean(0)


def choose(net, data, pool, count, passes, rank, world):
    own = pool[rank::world]                                         # shares may differ by one
    scores = disagreement(net, data.tensors[0][own], passes)
    top = scores.topk(min(count, len(own)))
    everyone = [None] * world
    dist.all_gather_object(everyone, [(s, own[i]) for s, i in zip(top.values.tolist(), top.indices.tolist())])
    ranked = sorted((item for part in everyone for item in part), key=lambda t: (-t[0], t[1]))
    return [index for _, index in ranked[:count]]


@torch.no_grad()
def test_accuracy(net, data, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    stat = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(stat)
    return stat[0].item() / stat[1].item()


def main():
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data, test = moons(1500, 1), moons(707, 2)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3)).tolist()
    labelled, pool = order[: args.start], order[args.start:]
    torch.manual_seed(10 * rank + 1)                                # dropout differs by rank, weights come from rank 0
    ddp = nn.parallel.DistributedDataParallel(BayesianMLP())
    ledger, start = [], time.perf_counter()
    for r in range(args.rounds):
        loss = fit(ddp, data, labelled, r, args)
        accuracy = test_accuracy(ddp.module, test, rank, world)
        if rank == 0:
            print(f"round {r} labels {len(labelled)} loss {loss:.4f} test {accuracy:.3f}", flush=True)
            ledger.append((r, len(labelled), loss, accuracy))
        if r == args.rounds - 1:
            break
        bought = choose(ddp.module, data, pool, args.buy, args.mc, rank, world)
        labelled = labelled + bought
        gone = set(bought)
        pool = [i for i in pool if i not in gone]
    if rank == 0:
        with open("ledger.csv", "w", newline="") as f:
            csv.writer(f).writerows([("round", "labels", "loss", "accuracy"), *ledger])
        torch.save({"state": ddp.module.state_dict(), "labelled": labelled}, "active.pt")
        print(f"done in {time.perf_counter() - start:.1f}s")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
