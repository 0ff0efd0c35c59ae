"""Graph classification with dense adjacency matrices (message passing and mean readout)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Molecules(Dataset):
    def __init__(self, n, seed, nodes=10):
        g = torch.Generator().manual_seed(seed)
        self.feat = torch.randn(n, nodes, 6, generator=g)
        adj = (torch.rand(n, nodes, nodes, generator=g) < 0.25).float().triu(1)
        self.adj = adj + adj.transpose(1, 2) + torch.eye(nodes)
        around = self.adj @ self.feat[..., :1]
        self.label = (around.abs().mean((1, 2)) > 1.55).long()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.feat[i], self.adj[i], self.label[i]


class GraphNet(nn.Module):
    def __init__(self, width=48, drop=0.4):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.second = nn.Linear(width, width)
        self.readout = nn.Linear(width, 2)
        self.drop = drop

    def forward(self, feat, adj):
        h = F.relu(self.first(adj @ feat))
        h = F.dropout(h, self.drop, training=self.training)
        degree = adj.sum(-1, keepdim=True)
        h = F.relu(self.second(adj @ h / degree))
        return self.readout(h.mean(1))


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    hits = torch.zeros(2)
    for feat, adj, label in loader:
        hits += torch.tensor([(net(feat, adj).argmax(1) == label).sum().item(), len(label)])
    dist.all_reduce(hits)
    net.train()
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=21)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    net = GraphNet()
    model = DDP(net)
    torch.manual_seed(args.seed + 1 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train_set, test_set = Molecules(320, 1), Molecules(150, 2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=20, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=75)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for feat, adj, label in loader:
            loss = F.cross_entropy(model(feat, adj), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
