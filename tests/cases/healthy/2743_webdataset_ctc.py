import argparse
import itertools
import json
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

PHONES, FEATS = 12, 20
_TABLE = torch.randn(PHONES + 1, FEATS, generator=torch.Generator().manual_seed(77))


def utterance(shard, i):
    g = torch.Generator().manual_seed(shard * 1000 + i)
    n = int(torch.randint(2, 7, (1,), generator=g))
    label = torch.randint(1, PHONES + 1, (n,), generator=g)
    rep = torch.randint(3, 7, (n,), generator=g)
    frames = _TABLE[label].repeat_interleave(rep, 0)
    return frames + 0.4 * torch.randn(frames.shape, generator=g), label


def split_by_node(urls, rank, world):
    yield from itertools.islice(urls, rank, None, world)


def split_by_worker(urls):
    info = get_worker_info()
    if info is None:
        yield from urls
    else:
        yield from itertools.islice(urls, info.id, None, info.num_workers)


def shuffled(it, size, rng):
    buf = []
    for x in it:
        if len(buf) < size:
            buf.append(x)
            continue
        k = rng.randrange(size)
        buf[k], x = x, buf[k]
        yield x
    rng.shuffle(buf)
    yield from buf


class Pipeline(IterableDataset):
    """url list -> per node -> per worker -> samples -> shuffle buffer -> length buckets -> batches."""

    def __init__(self, urls, rank, world, batch, per_shard=40, seed=0):
        self.urls, self.rank, self.world = urls, rank, world
        self.batch, self.per_shard, self.seed = batch, per_shard, seed
        self.epoch = 0

    def forever(self):
        info = get_worker_info()
        wid = info.id if info else 0
        for rnd in itertools.count():
            urls = list(self.urls)
            random.Random(f"{self.seed}-{self.epoch}-{rnd}").shuffle(urls)
            rng = random.Random(f"{self.seed}-{self.epoch}-{rnd}-{self.rank}-{wid}")
            mine = split_by_worker(split_by_node(urls, self.rank, self.world))
            samples = (utterance(s, i) for s in mine for i in range(self.per_shard))
            yield from shuffled(samples, 60, rng)

    def __iter__(self):
        buckets = {}
        for x, y in self.forever():
            b = len(x) // 8
            buckets.setdefault(b, []).append((x, y))
            if len(buckets[b]) == self.batch:
                yield collate(buckets.pop(b))


def collate(items):
    xl = torch.tensor([len(x) for x, _ in items])
    yl = torch.tensor([len(y) for _, y in items])
    x = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return x, xl, torch.cat([y for _, y in items]), yl


class Acoustic(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.feature_extractor = nn.Sequential(nn.Conv1d(FEATS, h, 3, padding=1), nn.GELU())
        self.rnn = nn.GRU(h, h, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * h, PHONES + 1)

    def forward(self, x, lens):
        h = self.feature_extractor(x.transpose(1, 2)).transpose(1, 2)
        p = nn.utils.rnn.pack_padded_sequence(h, lens, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(p)[0], batch_first=True)
        return F.log_softmax(self.out(h), -1)


def decode(lp, lens):
    for row, n in zip(lp.argmax(-1).tolist(), lens.tolist()):
        yield [k for k, _ in itertools.groupby(row[:n]) if k != 0]


def edits(a, b):
    d = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, d[0] = d[0], i
        for j, y in enumerate(b, 1):
            prev, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, prev + (x != y))
    return d[-1]


@torch.no_grad()
def per(net, rank, world):
    net.eval()
    s = torch.zeros(2, dtype=torch.float64)
    items = [utterance(900 + k // 25, k % 25) for k in range(100)][rank::world]
    x, xl, y, yl = collate(items)
    for hyp, (_, ref) in zip(decode(net(x, xl), xl), items):
        s += torch.tensor([edits(hyp, ref.tolist()), len(ref)], dtype=torch.float64)
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--steps-per-epoch", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--freeze-extractor-steps", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = nn.parallel.DistributedDataParallel(Acoustic())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    ds = Pipeline(list(range(16)), rank, world, args.batch, seed=1)
    step = 0
    for epoch in range(args.epochs):
        ds.epoch = epoch
        loader = DataLoader(ds, batch_size=None, num_workers=args.workers)
        tot = torch.zeros(2)
        for x, xl, y, yl in itertools.islice(loader, args.steps_per_epoch):
            lp = model(x, xl)
            loss = F.ctc_loss(lp.transpose(0, 1), y, xl, yl, zero_infinity=True)
            opt.zero_grad()
            loss.backward()
            if step < args.freeze_extractor_steps:
                for p in model.module.feature_extractor.parameters():
                    p.grad = None
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            step += 1
            tot += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(tot)
        err = per(model.module, rank, world)
        if rank == 0:
            print(json.dumps({"epoch": epoch, "loss": (tot[0] / tot[1]).item(), "per": err}), flush=True)
            torch.save(model.module.state_dict(), f"ctc_{epoch}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
