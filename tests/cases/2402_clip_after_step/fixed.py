import argparse
import json

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Graphs(Dataset):
    """Small random graphs; the node label depends on the features of its neighbours.
    A few graphs have hub nodes with very large features."""

    def __init__(self, n, seed, nodes=16, feats=8):
        g = torch.Generator().manual_seed(seed)
        proj = torch.randn(feats, 3, generator=torch.Generator().manual_seed(99))
        adj = (torch.rand(n, nodes, nodes, generator=g) < 0.2).float()
        adj = ((adj + adj.transpose(1, 2)) > 0).float()
        adj = adj + torch.eye(nodes)
        self.adj = adj / adj.sum(-1, keepdim=True)
        self.x = torch.randn(n, nodes, feats, generator=g)
        self.y = (self.adj @ self.x @ proj).argmax(-1)
        hubs = torch.rand(n, generator=g) < 0.05
        self.x[hubs, 0] *= 400.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.adj[i], self.x[i], self.y[i]


class SageNet(nn.Module):
    def __init__(self, feats=8, width=48, classes=3):
        super().__init__()
        self.self1, self.nei1 = nn.Linear(feats, width), nn.Linear(feats, width)
        self.self2, self.nei2 = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, adj, x):
        h = F.relu(self.self1(x) + self.nei1(adj @ x))
        h = F.relu(self.self2(h) + self.nei2(adj @ h))
        return self.head(h)


class NodeTrainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(args.seed)
        self.model = DDP(SageNet())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.train_ds, self.val_ds = Graphs(1024, 3), Graphs(256, 4)
        self.sampler = DistributedSampler(self.train_ds, shuffle=True, seed=args.seed)
        self.loader = DataLoader(self.train_ds, batch_size=16, sampler=self.sampler, drop_last=True)
        self.val_loader = DataLoader(
            self.val_ds, batch_size=32, sampler=DistributedSampler(self.val_ds, shuffle=False)
        )

    def fit(self):
        history = []
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            train_loss, norm = self.train_epoch()
            acc = self.evaluate()
            history.append({"epoch": epoch, "loss": train_loss, "max_norm": norm, "val_acc": acc})
            if self.rank == 0:
                print(json.dumps(history[-1]))
        return history

    def train_epoch(self):
        self.model.train()
        stats = torch.zeros(2, dtype=torch.float64)
        worst = 0.0
        for adj, x, y in self.loader:
            loss = F.cross_entropy(self.model(adj, x).flatten(0, 1), y.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            worst = max(worst, norm.item())
            stats += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(stats)
        return (stats[0] / stats[1]).item(), worst

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        hits = torch.zeros(2, dtype=torch.long)
        for adj, x, y in self.val_loader:
            pred = self.model(adj, x).argmax(-1)
            hits[0] += (pred == y).sum()
            hits[1] += y.numel()
        dist.all_reduce(hits)
        return hits[0].item() / hits[1].item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--max-grad-norm", type=float, default=0.5)
    p.add_argument("--seed", type=int, default=21)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        history = NodeTrainer(args).fit()
        if dist.get_rank() == 0:
            with open("history.json", "w") as f:
                json.dump(history, f)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
