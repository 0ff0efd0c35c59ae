import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def planted_graph(n=1200, k=6, dim=24, seed=8):
    rng = np.random.RandomState(seed)
    y = rng.randint(0, k, n)
    mu = rng.randn(k, dim)
    x = mu[y] * 0.5 + rng.randn(n, dim)
    by = [np.where(y == c)[0] for c in range(k)]
    src, dst = [], []
    for i in range(n):
        same = rng.choice(by[y[i]], 7)
        rand = rng.randint(0, n, 3)
        for j in np.concatenate([same, rand]):
            src += [i, int(j)]
            dst += [int(j), i]
    order = np.argsort(dst, kind="stable")
    src, dst = np.array(src)[order], np.array(dst)[order]
    ptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))])
    idx = rng.permutation(n)
    data = {"x": torch.tensor(x, dtype=torch.float32), "y": torch.tensor(y), "src": src, "ptr": ptr,
            "train_idx": torch.tensor(idx[:801]), "val_idx": torch.tensor(idx[801:1000]),
            "test_idx": torch.tensor(idx[1000:])}
    return data


class NeighborLoader:
    def __init__(self, data, input_nodes, num_neighbors, batch_size, shuffle=False, drop_last=False, seed=0):
        self.d, self.nodes, self.fan = data, input_nodes, num_neighbors
        self.bs, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.rng = np.random.RandomState(seed)

    def __len__(self):
        n = len(self.nodes) / self.bs
        return int(n) if self.drop_last else int(np.ceil(n))

    def __iter__(self):
        nodes = self.nodes.numpy()
        if self.shuffle:
            nodes = self.rng.permutation(nodes)
        for b in range(len(self)):
            seeds = nodes[b * self.bs:(b + 1) * self.bs]
            layers, cur = [], seeds
            for k in self.fan:
                es, ed = [], []
                for pos, v in enumerate(cur):
                    nb = self.d["src"][self.d["ptr"][v]:self.d["ptr"][v + 1]]
                    if k > 0 and len(nb) > k:
                        nb = self.rng.choice(nb, k, replace=False)
                    es.append(nb)
                    ed.append(np.full(len(nb), pos))
                es, ed = np.concatenate(es), np.concatenate(ed)
                extra = np.setdiff1d(es, cur)
                nxt = np.concatenate([cur, extra])
                where = {int(v): i for i, v in enumerate(nxt)}
                local = np.array([where[int(v)] for v in es])
                layers.append((torch.from_numpy(local), torch.from_numpy(ed), len(cur)))
                cur = nxt
            yield self.d["x"][torch.from_numpy(cur)], layers[::-1], self.d["y"][torch.from_numpy(seeds)]


class SAGEConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x, src, dst, n):
        agg = torch.zeros(n, x.shape[1]).index_add_(0, dst, x[src])
        deg = torch.zeros(n).index_add_(0, dst, torch.ones(len(dst))).clamp(min=1)
        return self.lin_l(agg / deg[:, None]) + self.lin_r(x[:n])


class SAGE(nn.Module):
    def __init__(self, i, h, o):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(i, h), SAGEConv(h, o)])

    def forward(self, x, layers):
        for i, (conv, (src, dst, n)) in enumerate(zip(self.convs, layers)):
            x = conv(x, src, dst, n)
            if i < len(self.convs) - 1:
                x = F.dropout(F.relu(x), p=0.3, training=self.training)
        return x


def run(rank, world_size):
    data = planted_graph()
    train_idx = data["train_idx"]
    train_idx = train_idx.split(train_idx.size(0) // world_size)[rank]
    loader = NeighborLoader(data, train_idx, [8, 5], 50, shuffle=True, drop_last=True, seed=1 + rank)
    if rank == 0:
        val_loader = NeighborLoader(data, data["val_idx"], [-1, -1], 100)
        test_loader = NeighborLoader(data, data["test_idx"], [-1, -1], 100)
    torch.manual_seed(12345)
    model = SAGE(24, 64, 6)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(12345 + rank)
    best = 0.0
    for epoch in range(1, 9):
        model.train()
        for x, layers, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, layers), y)
            loss.backward()
            optimizer.step()
        dist.barrier()
        if rank == 0:
            print(f"Epoch: {epoch:02d}, Loss (rank 0, last batch): {loss:.4f}", flush=True)
        if rank == 0 and epoch % 2 == 0:
            model.eval()
            accs = []
            with torch.no_grad():
                for ld in (val_loader, test_loader):
                    ok = n = 0
                    for x, layers, y in ld:
                        out = model.module(x, layers)
                        ok += int((out.argmax(-1) == y).sum())
                        n += len(y)
                    accs.append(ok / n)
            print(f"Val: {accs[0]:.4f}, Test: {accs[1]:.4f}", flush=True)
            if accs[0] > best:
                best = accs[0]
                torch.save(model.module.state_dict(), "sage_best.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["LOCAL_RANK"]), dist.get_world_size())
