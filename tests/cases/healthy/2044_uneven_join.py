"""Digit-like strokes from two collectors of unequal size; the rank that is done first shadows the other (Join)."""
import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def strokes(n, seed):
    """A path of 12 points; the class is its shape."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 1, 12)
    shapes = torch.stack([
        torch.stack([t, t], 1),
        torch.stack([(6.28 * t).cos(), (6.28 * t).sin()], 1),
        torch.stack([t, (6.28 * t).sin()], 1),
        torch.stack([t, (2 * t - 1).abs()], 1),
    ])
    scale = 0.6 + 0.8 * torch.rand(n, 1, 1, generator=g)
    path = scale * shapes[label] + 0.5 * torch.randn(n, 1, 2, generator=g) + 0.35 * torch.randn(n, 12, 2, generator=g)
    return TensorDataset(path, label)


class PathNet(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.point = nn.Linear(2, d)
        self.mix = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.out = nn.Sequential(nn.LayerNorm(2 * d), nn.Linear(2 * d, 4))

    def forward(self, path):
        return self.out(self.mix(self.point(path).relu())[0].mean(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)

    # The first collector has 208 paths (13 batches), the second 160 (10 batches).
    own = strokes(208 - 48 * rank, seed=rank)
    loader = DataLoader(own, args.batch, shuffle=True, generator=torch.Generator().manual_seed(rank))
    test = strokes(120, seed=90)
    model = DDP(PathNet())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    history = []
    for epoch in range(args.epochs):
        model.train()
        sums = torch.zeros(2)
        with Join([model]):
            for path, label in loader:
                loss = nn.functional.cross_entropy(model(path), label)
                opt.zero_grad()
                loss.backward()
                opt.step()
                sums += torch.tensor([loss.item() * len(label), float(len(label))])
        # The rank that ended early got the last weights from Join; its optimizer made fewer steps, so pass on rank 0's moments too.
        for state in opt.state.values():
            for value in state.values():
                dist.broadcast(value, 0)
        dist.all_reduce(sums)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                path, label = test.tensors
                right = (model.module(path).argmax(1) == label).float().mean().item()
            history.append({"epoch": epoch, "loss": (sums[0] / sums[1]).item(), "test": right})
            print(json.dumps(history[-1]), flush=True)
    if rank == 0:
        with open("history.json", "w") as f:
            json.dump(history, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
