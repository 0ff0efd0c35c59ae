"""Training in two jobs with warm-up and cosine decay per optimizer step."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Copying(Dataset):
    """The first symbol has to be remembered until the end."""

    def __init__(self, n=256, length=8, vocab=12):
        g = torch.Generator().manual_seed(93)
        self.tokens = torch.randint(0, vocab, (n, length), generator=g)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.tokens[i, 0]


class Attend(nn.Module):
    def __init__(self, vocab=12, length=8, width=32):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        h = self.tok(tokens) + self.pos.weight
        h = h + self.attn(h, h, h, need_weights=False)[0]
        return self.head(h[:, -1])


def warmup_cosine(opt, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))

    return LambdaLR(opt, factor)


def save(path, epoch, model, opt, sched):
    torch.save({"epoch": epoch, "model": model.module.state_dict(), "opt": opt.state_dict()}, path)


def load(path, model, opt, sched):
    ckpt = torch.load(path, map_location="cpu")
    model.module.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
    return ckpt["epoch"] + 1


def job(args, last_epoch):
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(Attend())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = Copying()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    sched = warmup_cosine(opt, warmup=len(loader), total=args.epochs * len(loader))
    first = load(args.ckpt, model, opt, sched) if os.path.exists(args.ckpt) else 0
    for epoch in range(first, last_epoch):
        sampler.set_epoch(epoch)
        for tokens, target in loader:
            loss = nn.functional.cross_entropy(model(tokens), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, lr {opt.param_groups[0]['lr']:.2e}", flush=True)
    if rank == 0:
        save(args.ckpt, epoch, model, opt, sched)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--ckpt", default="last.ckpt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    job(args, last_epoch=args.epochs // 2)
    job(args, last_epoch=args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
