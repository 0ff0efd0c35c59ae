"""Every rank has its own seed from the first line on; only what must agree has fixed generators."""
import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, random_split


class Augmented(Dataset):
    def __init__(self, base, train):
        self.base, self.train = base, train

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        x, y = self.base[i]
        if self.train:
            x = torch.roll(x, random.randrange(-2, 3)) * random.uniform(0.8, 1.2)
        return x, y


def bumps(n=400):
    g = torch.Generator().manual_seed(50)
    y = torch.randint(0, 3, (n,), generator=g)
    t = torch.arange(30).float()
    x = torch.exp(-(t - 15).pow(2) / (2 * (1.5 + 2.0 * y.float()).pow(2)).unsqueeze(1))
    return list(zip(x + 0.1 * torch.randn(n, 30, generator=g), y))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(7 + 13 * rank)
    torch.manual_seed(7 + 13 * rank)

    model = DDP(nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3)))
    train_part, val_part = random_split(bumps(), [320, 80], generator=torch.Generator().manual_seed(7))
    train_set, val_set = Augmented(train_part, True), Augmented(val_part, False)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=40)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in val_loader:
                hits += torch.tensor([float((model(x).argmax(1) == y).sum()), float(len(y))])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: validation {int(hits[0])}/{int(hits[1])}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
