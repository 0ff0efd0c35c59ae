"""Self-supervised pretraining on two noisy views (Barlow Twins)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n=768, dim=24):
        g = torch.Generator().manual_seed(12)
        basis = torch.randn(6, dim, generator=g)
        self.signal = torch.randn(n, 6, generator=g) @ basis

    def __len__(self):
        return len(self.signal)

    def view(self, i):
        keep = (torch.rand(self.signal.shape[1]) > 0.15).float()
        return self.signal[i] * keep + 0.3 * torch.randn(self.signal.shape[1])

    def __getitem__(self, i):
        return self.view(i), self.view(i)


class MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, c):
        out = c / dist.get_world_size()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad / dist.get_world_size()
        dist.all_reduce(out)
        return out


def mean_over_ranks(c):
    return MeanOverRanks.apply(c)


class BarlowLoss(nn.Module):
    def __init__(self, off_weight):
        super().__init__()
        self.off_weight = off_weight

    def forward(self, za, zb):
        za = (za - za.mean(0)) / (za.std(0, unbiased=False) + 1e-4)
        zb = (zb - zb.mean(0)) / (zb.std(0, unbiased=False) + 1e-4)
        c = mean_over_ranks(za.t() @ zb / len(za))
        on = (torch.diagonal(c) - 1).pow(2).sum()
        off = (c - torch.diag(torch.diagonal(c))).pow(2).sum()
        return on + self.off_weight * off


class Encoder(nn.Module):
    def __init__(self, dim=24, width=64, out=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.projector = nn.Linear(width, out)

    def forward(self, a, b):
        z = self.projector(self.backbone(torch.cat([a, b])))
        return z.chunk(2)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--off-weight", type=float, default=0.02)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Encoder())
    torch.manual_seed(100 + rank)  # own noise on every rank

    data = TwoViews()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    criterion = BarlowLoss(args.off_weight)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for a, b in loader:
            za, zb = model(a, b)
            loss = criterion(za, zb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.backbone.state_dict(), "backbone.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
