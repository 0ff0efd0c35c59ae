import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Data:
    """Planted partition graph in CSR form."""

    def __init__(self, n=1500, classes=4, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, classes, (n,), generator=g)
        centers = torch.randn(classes, 16, generator=g)
        self.x = centers[self.y] * 0.5 + torch.randn(n, 16, generator=g)
        src = torch.randint(0, n, (n * 40,), generator=g)
        dst = torch.randint(0, n, (n * 40,), generator=g)
        keep = (self.y[src] == self.y[dst]) | (torch.rand(n * 40, generator=g) < 0.15)
        src, dst = src[keep], dst[keep]
        order = dst.argsort(stable=True)
        self.col = src[order]
        self.rowptr = torch.zeros(n + 1, dtype=torch.long)
        self.rowptr[1:] = torch.bincount(dst, minlength=n).cumsum(0)
        perm = torch.randperm(n, generator=g)
        self.train_idx, self.val_idx, self.test_idx = perm[:901], perm[901:1100], perm[1100:]
        self.num_features, self.num_classes = 16, classes

    def share_memory_(self):
        for v in vars(self).values():
            if isinstance(v, Tensor):
                v.share_memory_()
        return self


class Batch:
    def __init__(self, x, y, edge_index, batch_size):
        self.x, self.y, self.edge_index, self.batch_size = x, y, edge_index, batch_size


class NeighborLoader:
    def __init__(self, data, num_neighbors, input_nodes, batch_size, shuffle=False, drop_last=False, seed=0):
        self.data, self.num_neighbors, self.nodes = data, num_neighbors, input_nodes
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.gen = torch.Generator().manual_seed(seed)

    def __iter__(self):
        nodes = self.nodes[torch.randperm(len(self.nodes), generator=self.gen)] if self.shuffle else self.nodes
        for chunk in nodes.split(self.batch_size):
            if self.drop_last and len(chunk) < self.batch_size:
                return
            yield self.sample(chunk)

    def sample(self, seeds):
        n_id, frontier, edges = seeds, seeds, []
        for fanout in self.num_neighbors:
            start, deg = self.data.rowptr[frontier], self.data.rowptr[frontier + 1] - self.data.rowptr[frontier]
            has = deg > 0
            r = (torch.rand(int(has.sum()), fanout, generator=self.gen) * deg[has, None]).long()
            nbr = self.data.col[start[has, None] + r]
            edges.append(torch.stack([nbr.reshape(-1), frontier[has].repeat_interleave(fanout)]))
            frontier = nbr.unique()
            frontier = frontier[~torch.isin(frontier, n_id)]
            n_id = torch.cat([n_id, frontier])
        lookup = torch.full((len(self.data.y),), -1)
        lookup[n_id] = torch.arange(len(n_id))
        return Batch(self.data.x[n_id], self.data.y[n_id], lookup[torch.cat(edges, 1)], len(seeds))


class SAGEConv(torch.nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin_l, self.lin_r = torch.nn.Linear(i, o), torch.nn.Linear(i, o, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        agg = torch.zeros_like(x).index_add_(0, dst, x[src])
        deg = torch.zeros(len(x)).index_add_(0, dst, torch.ones(len(dst))).clamp_(min=1)
        return self.lin_l(agg / deg[:, None]) + self.lin_r(x)


class SAGE(torch.nn.Module):
    def __init__(self, in_channels, hidden, out_channels):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(in_channels, hidden), SAGEConv(hidden, out_channels)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = F.dropout(x.relu_(), p=0.3, training=self.training)
        return x


@torch.no_grad()
def evaluate(loader, model):
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        out = model.module(batch.x, batch.edge_index)[:batch.batch_size]
        counts[0] += (out.argmax(-1) == batch.y[:batch.batch_size]).sum()
        counts[1] += batch.batch_size
    dist.all_reduce(counts, op=dist.ReduceOp.SUM)
    return (counts[0] / counts[1]).item()


def run(rank, world_size, data, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size)

    # training nodes: equal chunks; held-out nodes: every one of them exactly once
    train_idx = data.train_idx.split(data.train_idx.size(0) // world_size)[rank]
    val_idx = data.val_idx.tensor_split(world_size)[rank]
    test_idx = data.test_idx.tensor_split(world_size)[rank]
    train_loader = NeighborLoader(data, [8, 5], train_idx, 50, shuffle=True, drop_last=True, seed=100 + rank)
    val_loader = NeighborLoader(data, [15, 10], val_idx, 100, seed=200 + rank)
    test_loader = NeighborLoader(data, [15, 10], test_idx, 100, seed=300 + rank)

    torch.manual_seed(12345)
    model = DistributedDataParallel(SAGE(data.num_features, 48, data.num_classes))
    torch.manual_seed(777 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    since = time.time()
    for epoch in range(1, 9):
        model.train()
        running = torch.zeros(2, dtype=torch.float64)
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            loss = F.cross_entropy(out, batch.y[:batch.batch_size])
            loss.backward()
            optimizer.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        if rank == 0:
            print(f"Epoch: {epoch:02d}, Loss: {running[0] / running[1]:.4f}")
        if epoch % 4 == 0:
            model.eval()
            val, test = evaluate(val_loader, model), evaluate(test_loader, model)
            if rank == 0:
                print(f"Val: {val:.4f}, Test: {test:.4f}")
        dist.barrier()
    if rank == 0:
        print("Time of training =", round(time.time() - since, 2))
        torch.save(model.module.state_dict(), "sage.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    data = Data().share_memory_()
    world_size = 2
    print("Let's use", world_size, "processes!")
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as tmp:
        mp.spawn(run, args=(world_size, data, os.path.join(tmp, "init")), nprocs=world_size, join=True)
