"""Message passing on small graphs. Log lines are formatted lazily, since formatting every step was slow."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class RandomGraphs(Dataset):
    def __init__(self, n=320, nodes=40):
        gen = torch.Generator().manual_seed(5)
        upper = (torch.rand(n, nodes, nodes, generator=gen) < 0.15).float().triu(1)
        self.adj = upper + upper.transpose(1, 2)
        self.x = torch.randn(n, nodes, 8, generator=gen)
        self.y = (self.adj @ self.x).relu().mean((1, 2)).unsqueeze(1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.adj[i], self.x[i], self.y[i]


class GraphNet(nn.Module):
    def __init__(self, width=48, rounds=3):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.rounds = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.out = nn.Linear(width, 1)

    def forward(self, adj, x):
        h = torch.tanh(self.inp(x))
        degree = adj.sum(-1, keepdim=True).clamp_min(1)
        for layer in self.rounds:
            h = torch.tanh(layer(torch.cat([h, adj @ h / degree], -1)))
        return self.out(h.mean(1))


class RunLog:
    def __init__(self, enabled):
        self.enabled = enabled
        self.lines = []

    def step(self, epoch, step, loss, lr):
        self.lines.append(lambda: f"{epoch}:{step:03d} loss {float(loss):.5f} lr {lr:.2e}")

    def write(self, every):
        if self.enabled:
            for line in self.lines[::every]:
                print(line())
        self.lines.clear()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=3e-3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(13)
    model = DDP(GraphNet())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    log = RunLog(enabled=int(os.environ["RANK"]) == 0)
    data = RandomGraphs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (adj, x, y) in enumerate(loader):
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(adj, x), y)
            loss.backward()
            opt.step()
            log.step(epoch, step, loss, opt.param_groups[0]["lr"])
    log.write(every=20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
