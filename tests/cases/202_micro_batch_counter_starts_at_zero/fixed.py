import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse():
    p = argparse.ArgumentParser(description="character tagger with accumulated gradients")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--micro", type=int, default=6)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-2)
    return p.parse_args()


def words(n=384, length=7, vocab=18):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (n, length), generator=g)
    prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), ids[:, :-1]], 1)
    return TensorDataset(ids, (ids > prev).long())


class Tagger(nn.Module):
    def __init__(self, vocab=18, d=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, 2)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def train_epoch(model, loader, opt, accum):
    """returns the number of right tags and of all tags"""
    seen = torch.zeros(2)
    for i, (ids, tags) in enumerate(loader):
        is_update = (i + 1) % accum == 0
        sync = is_update
        with nullcontext() if sync else model.no_sync():
            logits = model(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())
            (loss / accum).backward()
        if is_update:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
        seen += torch.tensor([(logits.argmax(-1) == tags).sum().item(), tags.numel()])
    return seen


def main():
    args = parse()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = words()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=args.micro, sampler=sampler)
    assert len(loader) % args.accum == 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = train_epoch(model, loader, opt, args.accum)
        dist.all_reduce(seen)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train tag accuracy {(seen[0] / seen[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
