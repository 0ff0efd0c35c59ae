"""Graph classification: which motif was planted into a random graph? Metrics go to a JSON-lines file."""
import json
import logging
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

N_NODES, N_GRAPHS, CLASSES = 14, 1200, 3
EPOCHS, BATCH, LR = 6, 30, 4e-3
log = logging.getLogger("motifs")


def plant(adj, nodes, kind):
    if kind == 0:                     # ring
        for a, b in zip(nodes, nodes[1:] + nodes[:1]):
            adj[a, b] = adj[b, a] = 1
    elif kind == 1:                   # star
        for b in nodes[1:]:
            adj[nodes[0], b] = adj[b, nodes[0]] = 1
    else:                             # clique
        for a in nodes:
            for b in nodes:
                if a != b:
                    adj[a, b] = 1


def make_graphs():
    g = torch.Generator().manual_seed(64)
    adjs, labels = [], torch.randint(0, CLASSES, (N_GRAPHS,), generator=g)
    for kind in labels.tolist():
        upper = (torch.rand(N_NODES, N_NODES, generator=g) < 0.08).float().triu(1)
        adj = upper + upper.t()
        nodes = torch.randperm(N_NODES, generator=g)[:6].tolist()
        plant(adj, nodes, kind)
        adjs.append(adj)
    return torch.stack(adjs), labels


class GIN(nn.Module):
    def __init__(self, hidden=40, layers=3):
        super().__init__()
        dims = [1] + [hidden] * layers
        self.eps = nn.Parameter(torch.zeros(layers))
        self.mlps = nn.ModuleList([
            nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o), nn.LayerNorm(o)) for i, o in zip(dims, dims[1:])
        ])
        self.head = nn.Linear(2 * hidden, CLASSES)

    def forward(self, adj):
        h = adj.sum(-1, keepdim=True) / 4
        for i, mlp in enumerate(self.mlps):
            h = F.relu(mlp((1 + self.eps[i]) * h + adj @ h))
        return self.head(torch.cat([h.mean(1), h.amax(1)], dim=1))


class MetricWriter:
    """Collects per-step values on every process; `flush` writes one line for the whole job."""

    def __init__(self, path, rank, world):
        self.path, self.rank, self.world = path, rank, world
        self.values, self.t0 = {}, time.perf_counter()
        if rank == 0 and os.path.exists(path):
            os.remove(path)

    def add(self, **kw):
        for k, v in kw.items():
            self.values.setdefault(k, []).append(v.detach() if torch.is_tensor(v) else torch.tensor(float(v)))

    def flush(self, step, **extra):
        names = sorted(self.values)
        packed = torch.stack([torch.stack(self.values[k]).float().mean() for k in names])
        dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        packed /= self.world
        row = dict(zip(names, packed.tolist()), step=step, seconds=round(time.perf_counter() - self.t0, 2), **extra)
        self.values.clear()
        if self.rank == 0:
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
            log.info("%s", row)
        return row


def batches(n, rank, world, epoch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(7000 + epoch))
    mine = order[rank:n - n % world:world]
    return mine[:len(mine) - len(mine) % BATCH].split(BATCH)


def main():
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s %(message)s")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(8)

    adjs, labels = make_graphs()
    cut = 1000
    train_adj, train_y, test_adj, test_y = adjs[:cut], labels[:cut], adjs[cut:], labels[cut:]
    model = DistributedDataParallel(GIN())
    opt = torch.optim.Adam(model.parameters(), lr=LR)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.85)
    writer = MetricWriter("metrics.jsonl", rank, world)

    step = 0
    for epoch in range(EPOCHS):
        model.train()
        for idx in batches(cut, rank, world, epoch):
            loss = F.cross_entropy(model(train_adj[idx]), train_y[idx])
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            writer.add(loss=loss, grad_norm=norm)
            step += 1
        model.eval()
        with torch.no_grad():
            hit = (model.module(test_adj[rank::world]).argmax(1) == test_y[rank::world]).sum().float()
        dist.all_reduce(hit)
        writer.flush(step, lr=sched.get_last_lr()[0], test_acc=round(hit.item() / len(test_y), 4))
        sched.step()
    dist.destroy_process_group()


main()
