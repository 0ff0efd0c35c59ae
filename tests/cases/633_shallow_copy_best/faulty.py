"""Anomaly scores with a small flow-like network; keep-best by a global validation loss."""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(dim // 2, 32), nn.Tanh(), nn.Linear(32, dim))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        return torch.cat([a, b * s.exp() + t], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim=6, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(dim, i % 2) for i in range(depth))

    def forward(self, x):
        logdet = 0
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        return (0.5 * x.pow(2).sum(1) - logdet).mean()


class KeepBest:
    def __init__(self):
        self.loss, self.state = float("inf"), None

    def update(self, loss, model):
        if loss < self.loss:
            self.loss = loss
            self.state = copy.copy(model.state_dict())


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 6, generator=g)
    return TensorDataset(torch.cat([z[:, :3], 0.3 * z[:, 3:] + z[:, :3].sin()], 1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=0.02)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val = rows(256, 1), rows(96, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    val_loader = DataLoader(val, 48, sampler=DistributedSampler(val, shuffle=False))
    flow = Flow()
    model = DDP(flow)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    best = KeepBest()
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = model(x)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            s = torch.stack([flow(x) * len(x) for (x,) in val_loader]).sum()
        dist.all_reduce(s)
        nll = s.item() / len(val)
        best.update(nll, flow)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation nll {nll:.4f} (best {best.loss:.4f})")
    flow.load_state_dict(best.state)
    if dist.get_rank() == 0:
        torch.save(flow.state_dict(), "flow_best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
