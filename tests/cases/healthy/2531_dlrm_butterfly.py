"""Click-through model: embedding tables spread over the processes, multilayer perceptrons replicated."""
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

TABLES = [40, 25, 60, 10, 30]
EMB = 8
DENSE = 6


class Butterfly(torch.autograd.Function):
    """[global batch, own tables, EMB] -> [local batch, all tables, EMB]"""

    @staticmethod
    def forward(ctx, pooled, world, local_bs, counts):
        rank = dist.get_rank()
        ctx.info = (world, local_bs, counts, rank)
        own = counts[rank]
        inp = pooled.contiguous().view(-1)
        out = inp.new_empty(local_bs * sum(counts) * EMB)
        dist.all_to_all_single(out, inp, [local_bs * c * EMB for c in counts], [local_bs * own * EMB] * world)
        parts = out.split([local_bs * c * EMB for c in counts])
        return torch.cat([p.view(local_bs, c, EMB) for p, c in zip(parts, counts)], dim=1)

    @staticmethod
    def backward(ctx, grad):
        world, local_bs, counts, rank = ctx.info
        own = counts[rank]
        inp = torch.cat([g.contiguous().view(-1) for g in grad.split(counts, dim=1)])
        out = inp.new_empty(world * local_bs * own * EMB)
        dist.all_to_all_single(out, inp, [local_bs * own * EMB] * world, [local_bs * c * EMB for c in counts])
        return out.view(world * local_bs, own, EMB) / world, None, None, None


def mlp(sizes, out_act):
    mods = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        mods += [nn.Linear(a, b), nn.ReLU()]
    mods[-1] = out_act
    return nn.Sequential(*mods)


class DLRM(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        self.counts = [len(range(r, len(TABLES), world)) for r in range(world)]
        self.mine = list(range(rank, len(TABLES), world))
        self.emb_l = nn.ModuleList()
        for t in self.mine:
            e = nn.EmbeddingBag(TABLES[t], EMB, mode="sum", sparse=True)
            e.weight.data = torch.tensor(np.random.RandomState(t).uniform(-1, 1, (TABLES[t], EMB)) / np.sqrt(TABLES[t]),
                                         dtype=torch.float32)
            self.emb_l.append(e)
        n = len(TABLES) + 1
        self.bot_l = mlp([DENSE, 32, EMB], nn.ReLU())
        self.top_l = mlp([EMB + n * (n - 1) // 2, 48, 1], nn.Identity())
        self.register_buffer("li", torch.tril_indices(n, n, -1), persistent=False)

    def distribute(self):
        self.bot_l = DDP(self.bot_l)
        self.top_l = DDP(self.top_l)
        return self

    def forward(self, dense, lS_o, lS_i):
        """dense: local slice; indices and offsets: whole batch"""
        gbs = len(lS_o[0])
        pooled = torch.stack([self.emb_l[k](lS_i[t], lS_o[t]) for k, t in enumerate(self.mine)], dim=1)
        ly = Butterfly.apply(pooled, self.world, gbs // self.world, self.counts)
        x = self.bot_l(dense)
        T = torch.cat([x.unsqueeze(1), ly], dim=1)
        Z = torch.bmm(T, T.transpose(1, 2))
        return self.top_l(torch.cat([x, Z[:, self.li[0], self.li[1]]], dim=1)).squeeze(1)


class ClickLog:
    def __init__(self, n, seed):
        r, fixed = np.random.RandomState(seed), np.random.RandomState(3)
        self.taste = [fixed.randn(c) for c in TABLES]
        w = fixed.randn(DENSE)
        self.dense = r.randn(n, DENSE).astype(np.float32)
        self.bags = [[r.randint(0, c, r.randint(1, 4)) for _ in range(n)] for c in TABLES]
        score = self.dense @ w * 0.7 + sum(np.array([t[b].mean() for b in bag]) for t, bag in zip(self.taste, self.bags))
        self.y = (r.rand(n) < 1 / (1 + np.exp(-1.5 * score))).astype(np.float32)

    def batches(self, gbs, seed=None):
        order = np.arange(len(self.y))
        if seed is not None:
            np.random.RandomState(seed).shuffle(order)
        for s in range(0, len(order) - gbs + 1, gbs):
            ix = order[s:s + gbs]
            idx = [torch.tensor(np.concatenate([bag[i] for i in ix])) for bag in self.bags]
            off = [torch.tensor(np.cumsum([0] + [len(bag[i]) for i in ix][:-1])) for bag in self.bags]
            yield torch.tensor(self.dense[ix]), off, idx, torch.tensor(self.y[ix])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    np.random.seed(1)
    torch.manual_seed(1)
    gbs = 128
    sl = slice(rank * gbs // world, (rank + 1) * gbs // world)
    model = DLRM(rank, world).distribute()
    opt = torch.optim.SGD([{"params": [p for e in model.emb_l for p in e.parameters()], "lr": 2.0},
                           {"params": list(model.bot_l.parameters()) + list(model.top_l.parameters()), "lr": 0.2}], lr=0.2)
    loss_fn = nn.BCEWithLogitsLoss()
    train, test = ClickLog(6400, 10), ClickLog(1280, 11)
    for epoch in range(6):
        tot = torch.zeros(2)
        for j, (X, lS_o, lS_i, T) in enumerate(train.batches(gbs, seed=epoch)):
            E = loss_fn(model(X[sl], lS_o, lS_i), T[sl])
            opt.zero_grad()
            E.backward()
            opt.step()
            tot += torch.tensor([E.item(), 1.0])
        dist.all_reduce(tot)
        hit = torch.zeros(2)
        with torch.no_grad():
            for X, lS_o, lS_i, T in test.batches(gbs):
                z = model(X[sl], lS_o, lS_i)
                hit += torch.tensor([((z > 0).float() == T[sl]).sum().item(), float(len(z))])
        dist.all_reduce(hit)
        if rank == 0:
            print(f"Finished epoch {epoch}: loss {tot[0] / tot[1]:.4f}, accuracy {100 * hit[0] / hit[1]:.2f} %")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
