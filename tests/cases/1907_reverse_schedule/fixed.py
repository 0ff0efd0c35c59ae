"""Sequence reversal with a transformer; warm-up, then cosine decay to zero over the whole run."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Reversal(Dataset):
    def __init__(self, n, length=8, vocab=12, seed=0):
        self.tokens = torch.randint(0, vocab, (n, length), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.tokens[i].flip(0)


class Reverser(nn.Module):
    def __init__(self, vocab=12, length=8, dim=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        h = self.tok(x) + self.pos.weight.unsqueeze(0)
        return self.out(self.body(h))


def warmup_cosine(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def evaluate(model, data, rank, world):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        x = data.tokens[rank::world]
        hit = model.module(x).argmax(-1) == x.flip(1)
        counts += torch.tensor([hit.sum().item(), hit.numel()])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--warmup-ratio", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=13)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, test_set = Reversal(1280, seed=1), Reversal(200, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Reverser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    total_steps = args.epochs * len(loader)
    scheduler = warmup_cosine(optimizer, int(args.warmup_ratio * total_steps), total_steps)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            running += loss.detach()
        dist.all_reduce(running)
        acc = evaluate(model, test_set, rank, world)
        if rank == 0:
            mean = running.item() / (len(loader) * world)
            print(f"epoch {epoch}: loss {mean:.4f} token accuracy {acc:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
