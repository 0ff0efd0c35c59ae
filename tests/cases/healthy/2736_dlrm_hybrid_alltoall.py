import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel as DDP

TABLE_SIZES = [120, 300, 60, 200]


class All2All(Function):
    """(global batch, local tables, d) -> (local batch, all tables, d), and the way back for the gradient."""

    @staticmethod
    def forward(ctx, x, n_local):
        world = dist.get_world_size()
        ctx.shape, ctx.n_local = x.shape, n_local
        b = x.shape[0] // world
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return torch.cat(out.view(world, b, *x.shape[1:]).unbind(0), 1)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        g = torch.stack(grad.chunk(world, 1)).contiguous().view(ctx.shape)
        out = torch.empty_like(g)
        dist.all_to_all_single(out, g)
        return out / world, None


class Clicks:
    def __init__(self, n, seed):
        wr = np.random.RandomState(7)
        w = [wr.randn(s) for s in TABLE_SIZES]
        wd = wr.randn(5)
        rng = np.random.RandomState(seed)
        self.cat = np.stack([rng.randint(0, s, n) for s in TABLE_SIZES], 1)
        self.dense = rng.randn(n, 5).astype(np.float32)
        logit = sum(w[j][self.cat[:, j]] for j in range(len(TABLE_SIZES))) + self.dense @ wd
        self.y = (rng.rand(n) < 1 / (1 + np.exp(-1.5 * logit))).astype(np.float32)

    def batches(self, size, epoch):
        order = np.random.RandomState(1000 + epoch).permutation(len(self.y))
        for i in range(0, len(order) - size + 1, size):
            ix = order[i:i + size]
            yield torch.from_numpy(self.dense[ix]), torch.from_numpy(self.cat[ix]), torch.from_numpy(self.y[ix])


class LocalTables(nn.Module):
    def __init__(self, mine, dim):
        super().__init__()
        self.mine = mine
        self.tables = nn.ModuleDict({str(j): nn.EmbeddingBag(TABLE_SIZES[j], dim, mode="sum") for j in mine})
        for t in self.tables.values():
            nn.init.normal_(t.weight, 0, 0.1)

    def forward(self, cat):
        return torch.stack([self.tables[str(j)](cat[:, j:j + 1]) for j in self.mine], 1)


class TopNet(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, dim))
        n = len(TABLE_SIZES) + 1
        self.register_buffer("tri", torch.tril_indices(n, n, -1), persistent=False)
        self.top = nn.Sequential(nn.Linear(dim + n * (n - 1) // 2 + len(TABLE_SIZES) * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, emb):
        d = self.bottom(dense)
        t = torch.cat([d[:, None], emb], 1)
        z = torch.bmm(t, t.transpose(1, 2))[:, self.tri[0], self.tri[1]]
        return self.top(torch.cat([d, z, emb.flatten(1)], 1)).squeeze(-1)


def auc(score, y):
    order = score.argsort()
    ranks = torch.empty(len(score), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    pos = y > 0.5
    n1, n0 = pos.sum().item(), (~pos).sum().item()
    return ((ranks[pos].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)).item()


class HybridTrainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        per = len(TABLE_SIZES) // self.world
        torch.manual_seed(5 + 13 * self.rank)
        self.emb = LocalTables(list(range(self.rank * per, (self.rank + 1) * per)), args.dim)
        torch.manual_seed(5)
        self.top = DDP(TopNet(args.dim))
        self.opt_e = torch.optim.Adagrad(self.emb.parameters(), lr=args.lr)
        self.opt_d = torch.optim.Adam(self.top.parameters(), lr=2e-3)
        self.loss_fn = nn.BCEWithLogitsLoss()

    def local(self, t):
        return t.chunk(self.world)[self.rank]

    def step(self, dense, cat, y):
        e = All2All.apply(self.emb(cat), len(self.emb.mine))
        loss = self.loss_fn(self.top(self.local(dense), e), self.local(y))
        self.opt_e.zero_grad()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_e.step()
        self.opt_d.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, data):
        scores, ys = [], []
        for dense, cat, y in data.batches(self.args.batch, 0):
            e = All2All.apply(self.emb(cat), len(self.emb.mine))
            s = self.top.module(self.local(dense), e)
            parts = [torch.empty_like(s) for _ in range(self.world)]
            dist.all_gather(parts, s)
            scores.append(torch.cat(parts))
            ys.append(y)
        return auc(torch.cat(scores), torch.cat(ys))

    def save(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save({"tables": self.emb.state_dict(), "opt": self.opt_e.state_dict()},
                   os.path.join(folder, f"embeddings_rank{self.rank}.pt"))
        if self.rank == 0:
            torch.save({"top": self.top.module.state_dict(), "opt": self.opt_d.state_dict()}, os.path.join(folder, "dense.pt"))
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=256, help="global")
    ap.add_argument("--dim", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    tr = HybridTrainer(args)
    train, test = Clicks(10240, 1), Clicks(2048, 2)
    for epoch in range(args.epochs):
        tot, n = 0.0, 0
        for batch in train.batches(args.batch, epoch):
            tot += tr.step(*batch)
            n += 1
        m = torch.tensor([tot, float(n)])
        dist.all_reduce(m)
        a = tr.evaluate(test)
        if tr.rank == 0:
            print(f"epoch {epoch} loss {m[0] / m[1]:.4f} test auc {a:.4f}", flush=True)
        tr.save("dlrm")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
