"""Neighbour sampling after PyG's distributed_sampling.py: mp.spawn, training nodes split among ranks, rank 0 evaluates between barriers."""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Graph:
    def __init__(self, n=600, classes=4, deg=6):
        g = torch.Generator().manual_seed(12345)
        self.y = torch.randint(0, classes, (n,), generator=g)
        self.x = F.one_hot(self.y, classes).float() @ torch.randn(classes, 16, generator=g) + 1.5 * torch.randn(n, 16, generator=g)
        self.neigh = torch.empty(n, deg, dtype=torch.long)
        for c in range(classes):
            own = (self.y == c).nonzero().flatten()
            self.neigh[own] = own[torch.randint(0, len(own), (len(own), deg), generator=g)]
        noise = torch.rand(n, deg, generator=g) < 0.2
        self.neigh[noise] = torch.randint(0, n, (int(noise.sum()),), generator=g)
        perm = torch.randperm(n, generator=g)
        self.train_mask = torch.zeros(n, dtype=torch.bool)
        self.train_mask[perm[:400]] = True
        self.val_mask = torch.zeros(n, dtype=torch.bool)
        self.val_mask[perm[400:500]] = True
        self.num_features, self.num_classes = 16, classes


class NeighborLoader(DataLoader):
    def __init__(self, data, input_nodes, num_neighbors, **kwargs):
        self.graph, self.num_neighbors = data, num_neighbors
        super().__init__(input_nodes, collate_fn=self.sample, **kwargs)

    def sample(self, nodes):
        seeds = torch.stack(nodes)
        hops = [seeds]
        for k in self.num_neighbors:
            cur = hops[-1].flatten()
            pick = torch.randint(0, self.graph.neigh.size(1), (len(cur), k))
            hops.append(self.graph.neigh[cur].gather(1, pick))
        n1 = hops[1]
        n2 = hops[2].view(len(seeds), n1.size(1), -1)
        return self.graph.x[seeds], self.graph.x[n1], self.graph.x[n2], self.graph.y[seeds]


class SAGE(nn.Module):
    def __init__(self, i, h, o):
        super().__init__()
        self.l1, self.r1 = nn.Linear(i, h), nn.Linear(i, h, bias=False)
        self.l2, self.r2 = nn.Linear(h, o), nn.Linear(h, o, bias=False)

    def forward(self, x0, x1, x2):
        h0 = F.dropout((self.l1(x1.mean(1)) + self.r1(x0)).relu(), 0.5, self.training)
        h1 = F.dropout((self.l1(x2.mean(2)) + self.r1(x1)).relu(), 0.5, self.training)
        return self.l2(h1.mean(1)) + self.r2(h0)

    @torch.no_grad()
    def inference(self, g):
        h = (self.l1(g.x[g.neigh].mean(1)) + self.r1(g.x)).relu()
        return self.l2(h[g.neigh].mean(1)) + self.r2(h)


def run(rank, world_size, port, data):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train_idx = data.train_mask.nonzero(as_tuple=False).view(-1)
    train_idx = train_idx.split(train_idx.size(0) // world_size)[rank]
    torch.manual_seed(12345 + rank)
    train_loader = NeighborLoader(data, train_idx, [4, 3], batch_size=25, shuffle=True, num_workers=0, drop_last=True)
    model = SAGE(data.num_features, 32, data.num_classes)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 7):
        model.train()
        for x0, x1, x2, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x0, x1, x2), y)
            loss.backward()
            optimizer.step()
        dist.barrier()
        if rank == 0:
            print(f"Epoch: {epoch:02d}, Loss: {loss:.4f}")
        if rank == 0 and epoch % 2 == 0:
            model.eval()
            out = model.module.inference(data)
            res = out.argmax(dim=-1) == data.y
            acc1 = int(res[data.train_mask].sum()) / int(data.train_mask.sum())
            acc2 = int(res[data.val_mask].sum()) / int(data.val_mask.sum())
            print(f"Train: {acc1:.4f}, Val: {acc2:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    data = Graph()
    world_size = 2
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    print("Let's use", world_size, "processes!")
    mp.spawn(run, args=(world_size, port, data), nprocs=world_size, join=True)
