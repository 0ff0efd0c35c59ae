"""Tagging short sequences with a GRU; several micro batches make up one update."""
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Brackets(Dataset):
    """Depth (0..3) of every position in a random walk of opening and closing marks."""

    def __init__(self, n=176, length=14, seed=21):
        g = torch.Generator().manual_seed(seed)
        self.marks = torch.randint(0, 2, (n, length), generator=g)
        depth = torch.zeros(n, dtype=torch.long)
        self.depths = torch.empty(n, length, dtype=torch.long)
        for t in range(length):
            depth = (depth + 2 * self.marks[:, t] - 1).clamp(0, 3)
            self.depths[:, t] = depth

    def __len__(self):
        return len(self.marks)

    def __getitem__(self, i):
        return self.marks[i], self.depths[i]


class Tagger(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(2, 8)
        self.rnn = nn.GRU(8, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 4)

    def forward(self, marks):
        return self.out(self.rnn(self.embed(marks))[0])


class Trainer:
    def __init__(self, model, loader, sampler, accum, lr):
        self.model, self.loader, self.sampler, self.accum = model, loader, sampler, accum
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.loss = nn.CrossEntropyLoss()

    def window_size(self, i, total):
        start = i - i % self.accum
        return min(self.accum, total - start)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        total, shown = len(self.loader), 0.0
        for i, (marks, depths) in enumerate(self.loader):
            sync_now = (i + 1) % self.accum == 0 or i + 1 == total
            with nullcontext() if sync_now else self.model.no_sync():
                loss = self.loss(self.model(marks).flatten(0, 1), depths.flatten())
                (loss / self.window_size(i, total)).backward()
            shown += loss.item() / total
            if (i + 1) % self.accum == 0 or i + 1 == total:
                self.opt.step()
                self.opt.zero_grad()
        return shown


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    data = Brackets()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    trainer = Trainer(DDP(Tagger()), loader, sampler, args.accum, args.lr)
    for number in range(args.epochs):
        shown = trainer.epoch(number)
        if dist.get_rank() == 0:
            print(f"epoch {number}: {len(loader)} micro batches, loss {shown:.4f}", flush=True)
    if dist.get_rank() == 0:
        torch.save(trainer.model.module.state_dict(), "tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
