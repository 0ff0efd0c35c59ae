"""Ranking model. Batches are built by a batch sampler so that their size can grow during training."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Queries(Dataset):
    def __init__(self, n=400, docs=6, dim=10):
        gen = torch.Generator().manual_seed(20)
        self.feats = torch.randn(n, docs, dim, generator=gen)
        taste = torch.randn(dim, generator=gen)
        self.click = (self.feats @ taste + torch.randn(n, docs, generator=gen)).argmax(1)

    def __len__(self):
        return len(self.click)

    def __getitem__(self, i):
        return self.feats[i], self.click[i]


def make_loader(dataset, batch_size, shuffle):
    sampler = DistributedSampler(dataset, shuffle=shuffle)
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))


def new_epoch(loader, epoch):
    sampler = loader.sampler
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return loader


class Ranker(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, feats):
        return self.score(feats).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=10)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    model = DDP(Ranker())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = make_loader(Queries(), args.batch_size, shuffle=True)

    for epoch in range(args.epochs):
        top1 = torch.zeros(2)
        for feats, click in new_epoch(loader, epoch):
            scores = model(feats)
            loss = nn.functional.cross_entropy(scores, click)
            opt.zero_grad()
            loss.backward()
            opt.step()
            top1 += torch.tensor([(scores.argmax(1) == click).sum().item(), len(click)])
        dist.all_reduce(top1)
        if rank == 0:
            print(f"epoch {epoch}: top-1 {top1[0] / top1[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
