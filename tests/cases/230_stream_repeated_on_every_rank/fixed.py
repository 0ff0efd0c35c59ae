"""Streams JSON lines from files, hashing words to features; the files are written by rank 0 into a temporary folder."""
import json
import os
import random
import shutil
import tempfile
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

POSITIVE, NEGATIVE = "good fine great solid warm".split(), "bad poor weak cold broken".split()
NEUTRAL = "the a box road table north seven paper".split()


def write_reviews(folder, files=4, lines=84):
    rng = random.Random(8)
    for f in range(files):
        with open(os.path.join(folder, f"reviews-{f}.jsonl"), "w") as out:
            for _ in range(lines):
                label = rng.random() < 0.5
                words = rng.choices(POSITIVE if label else NEGATIVE, k=2) + rng.choices(NEUTRAL, k=6)
                rng.shuffle(words)
                out.write(json.dumps({"text": " ".join(words), "label": int(label)}) + "\n")


class ReviewStream(IterableDataset):
    def __init__(self, folder, rank, world, buckets=64):
        self.paths = sorted(os.path.join(folder, p) for p in os.listdir(folder))
        self.rank, self.world, self.buckets = rank, world, buckets
        self.epoch = 0

    def featurise(self, text):
        v = torch.zeros(self.buckets)
        for w in text.split():
            v[zlib.crc32(w.encode()) % self.buckets] += 1
        return v

    def __iter__(self):
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        part, parts = self.rank * parts + part, self.world * parts
        paths = list(self.paths)
        random.Random(self.epoch).shuffle(paths)
        position = 0
        for path in paths:
            with open(path) as f:
                for line in f:
                    if position % parts == part:
                        row = json.loads(line)
                        yield self.featurise(row["text"]), float(row["label"])
                    position += 1


def train(model, stream, epochs, rank):
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(epochs):
        stream.epoch = epoch
        counts = torch.zeros(2)
        for x, y in DataLoader(stream, batch_size=12):
            y = y.float()
            logit = model(x).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logit, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            counts += torch.tensor([((logit > 0) == (y > 0.5)).sum().item(), len(y)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: {int(counts[0])} of {int(counts[1])} right")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    if rank == 0:
        write_reviews(box[0])
    dist.broadcast_object_list(box, src=0)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1)))
    train(model, ReviewStream(box[0], rank, world), 3, rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
