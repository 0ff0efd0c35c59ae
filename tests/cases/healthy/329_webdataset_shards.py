"""Tar shards read by an IterableDataset: split by rank, then by worker, a shuffle buffer, equal step counts."""
import io
import os
import random
import shutil
import tarfile
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SHARDS, PER_SHARD, BATCH, WORKERS = 8, 48, 12, 1


def write_shards(folder):
    rng = np.random.default_rng(0)
    for s in range(SHARDS):
        with tarfile.open(os.path.join(folder, f"train-{s:04d}.tar"), "w") as tar:
            for k in range(PER_SHARD):
                label = int(rng.integers(4))
                signal = np.sin(np.arange(24) * (label + 1) / 3 + rng.uniform(0, 6)) + rng.normal(0, 0.2, 24)
                for ext, blob in (("npy", signal.astype("<f4").tobytes()), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{s:04d}{k:05d}.{ext}")
                    info.size = len(blob)
                    tar.addfile(info, io.BytesIO(blob))


class TarStream(IterableDataset):
    def __init__(self, urls, rank, world, buffer=32, seed=0):
        self.urls, self.rank, self.world, self.buffer, self.seed, self.epoch = urls, rank, world, buffer, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def samples(self, urls):
        for url in urls:
            with tarfile.open(url) as tar:
                part = {}
                for member in tar:
                    part[member.name.split(".")[1]] = tar.extractfile(member).read()
                    if len(part) == 2:
                        yield torch.from_numpy(np.frombuffer(part["npy"], "<f4").copy()), int(part["cls"])
                        part = {}

    def __iter__(self):
        info = get_worker_info()
        wid, n = (info.id, info.num_workers) if info else (0, 1)
        urls = list(self.urls)
        random.Random(self.seed + self.epoch).shuffle(urls)  # the same order everywhere, then split
        mine = urls[self.rank :: self.world][wid::n]
        rng = random.Random(hash((self.seed, self.epoch, self.rank, wid)))
        pool = []
        for sample in self.samples(mine):
            pool.append(sample)
            if len(pool) >= self.buffer:
                yield pool.pop(rng.randrange(len(pool)))
        rng.shuffle(pool)
        yield from pool


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    where = [tempfile.mkdtemp(prefix="shards-") if rank == 0 else None]
    if rank == 0:
        write_shards(where[0])
    dist.broadcast_object_list(where, src=0)
    urls = sorted(os.path.join(where[0], f) for f in os.listdir(where[0]))
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Unflatten(1, (1, 24)), nn.Conv1d(1, 12, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(48, 4)))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    stream = TarStream(urls, rank, world)
    steps = SHARDS * PER_SHARD // world // BATCH
    for epoch in range(3):
        stream.set_epoch(epoch)  # a new loader's workers are started below and get this epoch
        counts = torch.zeros(2)
        done = 0
        for x, y in DataLoader(stream, BATCH, num_workers=WORKERS, drop_last=True):
            out = model(x)
            opt.zero_grad()
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
            counts += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
            done += 1
        assert done == steps, (done, steps)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: running train accuracy {counts[0] / counts[1]:.3f} over {int(counts[1])} samples")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(where[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
