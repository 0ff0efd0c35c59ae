"""Recurrent net on long sequences; the gradient norm is watched."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def adding(n=256, steps=30):
    """The adding problem: sum of the two marked numbers."""
    g = torch.Generator().manual_seed(44)
    value = torch.rand(n, steps, generator=g)
    mark = torch.zeros(n, steps)
    first, second = torch.randint(0, steps // 2, (n,), generator=g), torch.randint(steps // 2, steps, (n,), generator=g)
    rows = torch.arange(n)
    mark[rows, first] = mark[rows, second] = 1
    return TensorDataset(torch.stack([value, mark], 2), value[rows, first] + value[rows, second])


class Adder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.rnn = nn.RNN(2, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--clip", type=float, default=0.25)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Adder())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = adding()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        norms = []
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            if rank == 0:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), args.clip).item())
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, largest gradient norm {max(norms):.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
