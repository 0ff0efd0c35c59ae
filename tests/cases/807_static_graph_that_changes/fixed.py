"""Curriculum: the ordering head joins after a warm-up epoch."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def sequences(n=192, steps=6):
    g = torch.Generator().manual_seed(83)
    x = torch.randn(n, steps, 4, generator=g).cumsum(1)
    swapped = torch.rand(n, generator=g) < 0.5
    x[swapped] = x[swapped].flip(1)
    return TensorDataset(x, x[:, :, 0].mean(1), swapped.float())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 24, batch_first=True)
        self.level = nn.Linear(24, 1)
        self.order = nn.Linear(24, 1)

    def forward(self, x, with_order):
        h = self.rnn(x)[1][0]
        return self.level(h).squeeze(1), self.order(h).squeeze(1) if with_order else None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--order-from", type=int, default=1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)

    model = DDP(Net(), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = sequences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, level, order in loader:
            with_order = epoch >= args.order_from
            p_level, p_order = model(x, with_order)
            loss = F.mse_loss(p_level, level)
            if with_order:
                loss = loss + 0.5 * F.binary_cross_entropy_with_logits(p_order, order)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
