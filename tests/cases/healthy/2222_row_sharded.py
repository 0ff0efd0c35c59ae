"""Click prediction with hybrid parallelism: each rank owns whole embedding tables, the dense part is replicated under DDP."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS = [400, 60, 900, 30]


class Clicks(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(21)
        effects = [torch.randn(r, generator=g) for r in ROWS]
        w = torch.randn(6, generator=g)
        g.manual_seed(seed)
        self.dense = torch.randn(n, 6, generator=g)
        self.cat = torch.stack([(torch.rand(n, generator=g) ** 2 * r).long() for r in ROWS], 1)
        score = self.dense @ w * 0.5 + sum(e[self.cat[:, i]] for i, e in enumerate(effects))
        self.label = (torch.rand(n, generator=g) < torch.sigmoid(1.5 * score)).float()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.dense[i], self.cat[i], self.label[i]


class ExchangeVectors(torch.autograd.Function):
    """(tables here, global batch, dim) -> (all tables, local batch, dim); backward is the way home"""

    @staticmethod
    def forward(ctx, owned, counts):
        world = dist.get_world_size()
        ctx.counts, ctx.world = counts, world
        outgoing = [c.contiguous() for c in owned.chunk(world, dim=1)]
        incoming = [torch.empty(n, outgoing[0].size(1), owned.size(2)) for n in counts]
        dist.all_to_all(incoming, outgoing) if dist.get_backend() != "gloo" else swap(incoming, outgoing)
        return torch.cat(incoming)

    @staticmethod
    def backward(ctx, grad):
        rank = dist.get_rank()
        outgoing = [g.contiguous() for g in grad.split(ctx.counts)]
        incoming = [torch.empty(ctx.counts[rank], grad.size(1), grad.size(2)) for _ in range(ctx.world)]
        dist.all_to_all(incoming, outgoing) if dist.get_backend() != "gloo" else swap(incoming, outgoing)
        # the objective is the mean of the ranks' mean losses; DDP divides the dense part, this divides the tables
        return torch.cat(incoming, dim=1) / ctx.world, None


def swap(incoming, outgoing):
    rank, pending = dist.get_rank(), []
    for peer in range(dist.get_world_size()):
        if peer == rank:
            incoming[peer].copy_(outgoing[peer])
        else:
            pending += [dist.isend(outgoing[peer], peer), dist.irecv(incoming[peer], peer)]
    for work in pending:
        work.wait()

class SumToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        dist.all_reduce(partial)
        rank, world = dist.get_rank(), dist.get_world_size()
        return partial.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts) / dist.get_world_size()


class ShardedTables(nn.Module):
    """each rank holds every world-th row of every table"""
    def __init__(self, dim):
        super().__init__()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tables = nn.ModuleList(nn.Embedding(r // self.world, dim) for r in ROWS)
        for t in self.tables:
            nn.init.normal_(t.weight, std=0.05)

    def forward(self, cat):
        parts = [torch.empty_like(cat) for _ in range(self.world)]
        dist.all_gather(parts, cat)
        whole = torch.cat(parts)
        mine = whole % self.world == self.rank
        out = torch.stack([t(whole[:, i] // self.world) * mine[:, i, None] for i, t in enumerate(self.tables)], 1)
        return SumToOwners.apply(out)


class Dense(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, dim))
        n = len(ROWS) + 1
        self.register_buffer("tri", torch.triu_indices(n, n, 1), persistent=False)
        self.top = nn.Sequential(nn.Linear(dim * n + n * (n - 1) // 2, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, dense, vectors):
        z = torch.cat([self.bottom(dense)[:, None], vectors], 1)
        dots = (z @ z.transpose(1, 2))[:, self.tri[0], self.tri[1]]
        return self.top(torch.cat([z.flatten(1), dots], 1)).squeeze(1)


def auc(score, label):
    rank = score.argsort().argsort().double() + 1
    pos, neg = label.sum(), (1 - label).sum()
    return ((rank[label == 1].sum() - pos * (pos + 1) / 2) / (pos * neg)).item()


@torch.no_grad()
def evaluate(tables, dense, loader, size):
    tables.eval(), dense.eval()
    rows = []
    for x, c, y in loader:
        rows.append(torch.stack([dense.module(x, tables(c)), y]))
    rows = torch.cat(rows, 1)
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    score, label = torch.stack(parts, 2).flatten(1)[:, :size]           # sampler order, padding removed
    return auc(score, label), F.binary_cross_entropy_with_logits(score, label).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--mini-batch", type=int, default=64, help="per rank")
    p.add_argument("--dim", type=int, default=8)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(50 + rank)
    train, test = Clicks(6000, 1), Clicks(1501, 2)
    tables, dense = ShardedTables(args.dim), DDP(Dense(args.dim))
    opt_sparse = torch.optim.Adam(tables.parameters(), lr=0.01)
    opt_dense = torch.optim.Adam(dense.parameters(), lr=3e-3)
    sampler = DistributedSampler(train, seed=8)
    loader = DataLoader(train, args.mini_batch, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, 256, sampler=DistributedSampler(test, shuffle=False))
    os.makedirs("dlrm", exist_ok=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tables.train(), dense.train()
        total = torch.zeros(1)
        for x, c, y in loader:
            loss = F.binary_cross_entropy_with_logits(dense(x, tables(c)), y)
            opt_sparse.zero_grad()
            opt_dense.zero_grad()
            loss.backward()
            opt_sparse.step()
            opt_dense.step()
            total += loss.detach()
        dist.all_reduce(total)
        score, test_loss = evaluate(tables, dense, test_loader, len(test))
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f} test {test_loss:.4f} auc {score:.4f}", flush=True)
        torch.save({"state": tables.state_dict()}, f"dlrm/tables.{rank}.pt")    # each rank its own rows
        if rank == 0:
            torch.save(dense.module.state_dict(), "dlrm/dense.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
