"""Graph network on small random graphs."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Graphs(Dataset):
    def __init__(self, n, nodes=10):
        g = torch.Generator().manual_seed(18)
        upper = (torch.rand(n, nodes, nodes, generator=g) < 0.3).float().triu(1)
        self.adj = upper + upper.transpose(1, 2)
        self.feat = torch.randn(n, nodes, 4, generator=g)
        triangles = torch.linalg.matrix_power(self.adj, 3).diagonal(dim1=1, dim2=2).sum(1) / 6
        self.y = (triangles > triangles.median()).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.adj[i], self.feat[i], self.y[i]


class GraphLayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.own, self.neighbours = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, adj, h):
        return torch.relu(self.own(h) + self.neighbours(adj @ h))


class GraphNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.layers = nn.ModuleList([GraphLayer(5, width), GraphLayer(width, width), GraphLayer(width, width)])
        self.readout = nn.Linear(width, 2)

    def forward(self, adj, feat):
        h = torch.cat([feat, adj.sum(2, keepdim=True)], 2)
        for layer in self.layers:
            h = layer(adj, h)
        return self.readout(h.mean(1))


def wrap(net, args):
    return DDP(net, bucket_cap_mb=args.bucket_mb, find_unused_parameters=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bucket-mb", type=int, default=25)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=16)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(6)
    model = wrap(GraphNet(), args)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = Graphs(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        c = torch.zeros(2)
        for adj, feat, y in loader:
            out = model(adj, feat)
            opt.zero_grad()
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
            c += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(c)
        if rank == 0:
            print(f"epoch {epoch}: running accuracy {(c[0] / c[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
