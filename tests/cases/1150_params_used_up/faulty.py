"""Recurrent regression on sums with gradient clipping; the embedding is fixed."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, n=320, length=14):
        g = torch.Generator().manual_seed(91)
        self.seq = torch.randint(0, 10, (n, length), generator=g)

    def __len__(self):
        return len(self.seq)

    def __getitem__(self, i):
        s = self.seq[i]
        return s, (s.float().sum() - 4.5 * len(s)) / 3


class Adder(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        table = torch.stack([torch.arange(10) / 9.0, (torch.arange(10) % 2).float(), torch.ones(10)], 1)
        self.embed = nn.Embedding.from_pretrained(table, freeze=True)
        self.rnn = nn.RNN(3, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, seq):
        return self.out(self.rnn(self.embed(seq))[0][:, -1]).squeeze(1)


class Fitter:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(args.seed)
        self.model = DDP(Adder())
        self.params = filter(lambda p: p.requires_grad, self.model.parameters())
        self.opt = torch.optim.SGD(self.params, lr=args.lr, momentum=0.9)
        self.data = Digits()
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, batch_size=16, sampler=self.sampler)

    def step(self, seq, target):
        loss = (self.model(seq) - target).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        clip_grad_norm_(self.params, self.args.max_norm)
        self.opt.step()
        return loss.item()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            losses = [self.step(seq, target) for seq, target in self.loader]
            if self.rank == 0:
                print(f"epoch {epoch}: mean {sum(losses) / len(losses):.2f}, max {max(losses):.2f}", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Fitter(args).fit()
    dist.destroy_process_group()
