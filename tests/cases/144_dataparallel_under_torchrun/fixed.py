"""Relation networks on small graphs (message passing by hand), several processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn


def graphs(seed, n, nodes=7):
    """Random graphs with random node marks; the target is the number of edges between marked nodes."""
    g = torch.Generator().manual_seed(seed)
    upper = torch.triu((torch.rand(n, nodes, nodes, generator=g) < 0.4).float(), diagonal=1)
    adj = upper + upper.transpose(1, 2)
    mark = (torch.rand(n, nodes, generator=g) < 0.5).float()
    return adj, mark, (mark.unsqueeze(1) * mark.unsqueeze(2) * upper).sum((1, 2))


class MessageNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.start = nn.Linear(1, width)
        self.message, self.keep = nn.Linear(width, width), nn.Linear(width, width)
        self.read = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, adj, mark):
        h = torch.relu(self.start(mark.unsqueeze(2)))
        for _ in range(2):
            h = torch.relu(self.keep(h) + adj @ self.message(h))
        return self.read(h).sum((1, 2))


class Experiment:
    def __init__(self, lr):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        net = MessageNet()
        self.model = nn.parallel.DistributedDataParallel(net)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)

    def train(self, first, steps, batch=32):
        total = torch.zeros(())
        for k in range(first, first + steps):
            adj, mark, target = graphs(seed=k * self.world + self.rank, n=batch)
            loss = nn.functional.smooth_l1_loss(self.model(adj, mark), target)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.detach()
        return total / steps

    @torch.no_grad()
    def test(self, n=200):
        self.model.eval()
        adj, mark, target = (t[self.rank :: self.world] for t in graphs(seed=10**6, n=n))
        error = (self.model.module(adj, mark) - target).abs().mean()  # parts of equal size
        self.model.train()
        return error


def main():
    dist.init_process_group("gloo")
    exp = Experiment(lr=5e-3)
    for r in range(6):
        both = torch.stack([exp.train(first=25 * r, steps=25), exp.test()])
        dist.all_reduce(both)
        both /= exp.world
        if exp.rank == 0:
            print(f"round {r}: train loss {both[0].item():.4f}, test error {both[1].item():.4f}", flush=True)
    if exp.rank == 0:
        torch.save(exp.model.module.state_dict(), "message_net.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
