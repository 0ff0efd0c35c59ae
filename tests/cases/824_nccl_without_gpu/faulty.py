"""Quantile regression."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def skewed(n=256):
    g = torch.Generator().manual_seed(23)
    x = 2 * torch.rand(n, 1, generator=g)
    noise = torch.rand(n, 1, generator=g).log().neg()
    return TensorDataset(x, x * noise)


def pinball(pred, y):
    diff = y - pred
    return torch.maximum(QUANTILES * diff, (QUANTILES - 1) * diff).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--backend", default="nccl")
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()

    dist.init_process_group(args.backend)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(1, 24), nn.ReLU(), nn.Linear(24, 3)).to(device))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = skewed()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = pinball(model(x.to(device)).cpu(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: pinball loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
