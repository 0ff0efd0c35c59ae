"""Tiny transformer that learns to reverse digit strings; warm-up and cosine decay."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Reversal(Dataset):
    def __init__(self, n=512, length=8):
        self.digits = torch.randint(0, 10, (n, length), generator=torch.Generator().manual_seed(33))

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, i):
        return self.digits[i], self.digits[i].flip(0)


class Reverser(nn.Module):
    def __init__(self, length=8, dim=32):
        super().__init__()
        self.embed = nn.Embedding(10, dim)
        self.place = nn.Parameter(0.1 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 10)

    def forward(self, digits):
        return self.out(self.encoder(self.embed(digits) + self.place))


def cosine_with_warmup(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(args.seed)
        self.model = DDP(Reverser())
        self.data = Reversal()
        self.sampler = DistributedSampler(self.data, seed=args.seed)
        self.loader = DataLoader(self.data, batch_size=args.batch_size, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        steps_per_epoch = len(self.loader)
        total = args.epochs * steps_per_epoch
        self.scheduler = cosine_with_warmup(self.optimizer, int(0.1 * total), total)

    def train(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            meter = torch.zeros(2)
            for digits, target in self.loader:
                loss = nn.functional.cross_entropy(self.model(digits).flatten(0, 1), target.flatten())
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                meter += torch.tensor([loss.item() * len(digits), len(digits)])
            dist.all_reduce(meter)
            if self.rank == 0:
                lr = self.scheduler.get_last_lr()[0]
                print(f"epoch {epoch}: loss {(meter[0] / meter[1]).item():.4f} lr {lr:.5f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=9)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Trainer(args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
