"""Sequence tagging with gradient accumulation."""
import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TAGS = 3


def sentences(n=512, length=10, words=40):
    g = torch.Generator().manual_seed(14)
    tokens = torch.randint(0, words, (n, length), generator=g)
    left = torch.roll(tokens, 1, dims=1)
    left[:, 0] = 0
    return TensorDataset(tokens, (tokens + left) % TAGS)


class Tagger(nn.Module):
    def __init__(self, words=40, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(2 * width, TAGS)

    def forward(self, tokens, tags):
        h, _ = self.lstm(self.embed(tokens))
        return nn.functional.cross_entropy(self.classify(h).transpose(1, 2), tags)


def train_epoch(ddp, loader, optimizer, accumulate):
    seen = torch.zeros(2)
    optimizer.zero_grad()
    for step, (tokens, tags) in enumerate(loader):
        sync_now = (step + 1) % accumulate == 0
        with contextlib.ExitStack() as stack:
            if not sync_now:
                stack.enter_context(ddp.no_sync())
            loss = ddp(tokens, tags)
            (loss / accumulate).backward()
        seen += torch.tensor([loss.item(), 1.0])
        if (step + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(seen)
    return (seen[0] / seen[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--micro", type=int, default=8)
    ap.add_argument("--accumulate", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro, sampler=sampler)
    ddp = DDP(Tagger())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = train_epoch(ddp, loader, optimizer, args.accumulate)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
