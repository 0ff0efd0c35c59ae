"""Streaming JSON-lines shards split by rank and by DataLoader worker, a prefetch thread, accumulation.

Four shards a rank, two a worker; a shuffle buffer seeded by the epoch. The last accumulation window of
an epoch is shorter; windows are gathered first so that every loss is divided by its real length.
"""
import contextlib
import glob
import json
import os
import queue
import random
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SHARDS, ROWS, ACCUM = 8, 120, 4


def write_shards():
    os.makedirs("shards", exist_ok=True)
    rng = random.Random(55)
    words = ["red", "green", "blue", "hot", "cold", "near", "far", "up", "down", "in"]
    for k in range(SHARDS + 1):  # the last one is the test shard
        with open(f"shards/part-{k:02d}.jsonl", "w") as fh:
            for _ in range(ROWS):
                w = [rng.choice(words) for _ in range(9)]
                score = w.count("hot") + w.count("up") - w.count("cold") - w.count("down")
                fh.write(json.dumps({"words": w, "score": score}) + "\n")
    with open("shards/vocab.json", "w") as fh:
        json.dump(words, fh)


class Stream(IterableDataset):
    def __init__(self, files, vocab, rank, world):
        self.files, self.index, self.rank, self.world = files, {w: i for i, w in enumerate(vocab)}, rank, world
        self.epoch = 0

    def __iter__(self):
        info = get_worker_info()
        wid, wn = (info.id, info.num_workers) if info else (0, 1)
        rng = random.Random(f"{self.epoch}-{self.rank}-{wid}")
        mine = self.files[self.rank::self.world][wid::wn]
        rng.shuffle(mine)
        buf = []
        for path in mine:
            with open(path) as fh:
                for line in fh:
                    row = json.loads(line)
                    item = (torch.tensor([self.index[w] for w in row["words"]]), float(row["score"]))
                    if len(buf) < 64:
                        buf.append(item)
                        continue
                    at = rng.randrange(64)
                    out, buf[at] = buf[at], item
                    yield out
        rng.shuffle(buf)
        yield from buf


def prefetched(iterable, depth=4):
    q, stop = queue.Queue(depth), object()

    def fill():
        for item in iterable:
            q.put(item)
        q.put(stop)

    t = threading.Thread(target=fill, daemon=True)
    t.start()
    while (item := q.get()) is not stop:
        yield item
    t.join()


def windows(batches, n):
    cur = []
    for b in batches:
        cur.append(b)
        if len(cur) == n:
            yield cur
            cur = []
    if cur:
        yield cur


class Bag(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.emb = nn.Embedding(vocab, 16)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(self.emb(x).sum(1)).squeeze(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards()
    dist.barrier()
    with open("shards/vocab.json") as fh:
        vocab = json.load(fh)
    files = sorted(glob.glob("shards/part-*.jsonl"))
    stream = Stream(files[:SHARDS], vocab, rank, world)
    torch.manual_seed(19)
    ddp = DDP(Bag(len(vocab)))
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    steps = 0
    for epoch in range(5):
        stream.epoch = epoch  # new workers are started each epoch, so they see it
        loader = DataLoader(stream, batch_size=16, num_workers=2)
        ddp.train()
        tot = torch.zeros(2, dtype=torch.float64)
        for window in windows(prefetched(loader), ACCUM):
            opt.zero_grad()
            for i, (x, y) in enumerate(window):
                last = i == len(window) - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = F.mse_loss(ddp(x), y.float())
                    (loss / len(window)).backward()
                tot += torch.tensor([loss.item() * len(y), len(y)], dtype=torch.float64)
            opt.step()
            steps += 1
        dist.all_reduce(tot)
        assert tot[1] == SHARDS * ROWS  # each row once
        if rank == 0:
            print(f"epoch {epoch} steps {steps} mse {tot[0] / tot[1]:.4f}", flush=True)
    ddp.eval()
    with torch.no_grad(), open(files[SHARDS]) as fh:
        rows = [json.loads(r) for r in fh][rank::world]
        x = torch.tensor([[stream.index[w] for w in r["words"]] for r in rows])
        y = torch.tensor([float(r["score"]) for r in rows])
        s = torch.stack([(ddp.module(x) - y).pow(2).sum(), torch.tensor(float(len(y)))])
    dist.all_reduce(s)
    if rank == 0:
        print(f"test mse {s[0] / s[1]:.4f}")
        torch.save(ddp.module.state_dict(), "stream.pt")
    assert s[0] / s[1] < 1.0
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
