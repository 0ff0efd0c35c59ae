"""Click-through model trained from a directory of shards."""
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


@dataclass
class Config:
    seed: int = 7
    shards: int = 16
    rows_per_shard: int = 192
    fields: int = 6
    cardinality: int = 50
    batch_size: int = 32
    workers: int = 2
    epochs: int = 4
    lr: float = 5e-3
    buffer: int = 96
    root: str = "shards"


def write_shards(cfg):
    root = Path(cfg.root)
    root.mkdir(exist_ok=True)
    rng = np.random.RandomState(1234)
    effect = rng.randn(cfg.fields, cfg.cardinality)
    for shard in range(cfg.shards):
        ids = rng.randint(0, cfg.cardinality, size=(cfg.rows_per_shard, cfg.fields))
        logit = effect[np.arange(cfg.fields), ids].sum(1)
        label = rng.uniform(size=cfg.rows_per_shard) < 1 / (1 + np.exp(-logit))
        np.savez(root / f"part-{shard:05d}.npz", ids=ids, label=label.astype(np.float32))


class ShardStream(IterableDataset):
    def __init__(self, paths, seed, rank, world, buffer):
        self.paths = sorted(paths)
        self.seed = seed
        self.rank, self.world = rank, world
        self.buffer = buffer
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _assigned(self):
        order = list(self.paths)
        random.Random(self.seed * 1000 + self.epoch).shuffle(order)
        mine = order[self.rank::self.world]
        info = get_worker_info()
        if info is not None:
            mine = mine[info.id::info.num_workers]
        return mine

    def _rows(self):
        for path in self._assigned():
            with np.load(path) as part:
                ids, label = part["ids"], part["label"]
            for i in range(len(label)):
                yield torch.from_numpy(ids[i]), float(label[i])

    def __iter__(self):
        info = get_worker_info()
        wid = 0 if info is None else info.id
        rng = random.Random(hash((self.seed, self.epoch, self.rank, wid)))
        pool = []
        for row in self._rows():
            if len(pool) < self.buffer:
                pool.append(row)
                continue
            slot = rng.randrange(self.buffer)
            pool[slot], out = row, pool[slot]
            yield out
        rng.shuffle(pool)
        yield from pool


def collate(rows):
    return torch.stack([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


class WideAndDeep(nn.Module):
    def __init__(self, cfg, dim=8):
        super().__init__()
        total = cfg.fields * cfg.cardinality
        self.register_buffer("offset", torch.arange(cfg.fields) * cfg.cardinality)
        self.wide = nn.Embedding(total, 1)
        self.deep = nn.Embedding(total, dim)
        self.mlp = nn.Sequential(nn.Linear(cfg.fields * dim, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, ids):
        ids = ids + self.offset
        return self.wide(ids).sum(1).squeeze(-1) + self.mlp(self.deep(ids).flatten(1)).squeeze(-1)


def main():
    torch.set_num_threads(1)
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards(cfg)
    dist.barrier()

    run_seed = cfg.seed + rank
    random.seed(run_seed)
    np.random.seed(run_seed)
    torch.manual_seed(run_seed)

    stream = ShardStream(Path(cfg.root).glob("part-*.npz"), cfg.seed, rank, world, cfg.buffer)
    loader = DataLoader(stream, batch_size=cfg.batch_size, num_workers=cfg.workers, collate_fn=collate, drop_last=True)
    model = DistributedDataParallel(WideAndDeep(cfg))
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(cfg.epochs):
        stream.set_epoch(epoch)
        stats = torch.zeros(3, dtype=torch.float64)
        for ids, label in loader:
            logits = model(ids)
            loss = criterion(logits, label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            hits = ((logits.detach() > 0).float() == label).sum().item()
            stats += torch.tensor([loss.item() * len(label), hits, len(label)], dtype=torch.float64)
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[2]:.4f} acc {stats[1] / stats[2]:.4f} rows {int(stats[2])}",
                  flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "ctr.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
