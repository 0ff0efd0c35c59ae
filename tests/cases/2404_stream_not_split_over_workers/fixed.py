import argparse
import json
import pathlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

N_SHARDS, ROWS, N_ITEMS, N_USERS = 8, 512, 24, 40


def write_shards(root):
    rng = np.random.default_rng(17)
    u, v = rng.normal(size=(N_USERS, 4)), rng.normal(size=(N_ITEMS, 4))
    root.mkdir(exist_ok=True)
    for s in range(N_SHARDS + 2):
        users = rng.integers(0, N_USERS, ROWS)
        items = rng.integers(0, N_ITEMS, ROWS)
        p = 1 / (1 + np.exp(-2.0 * (u[users] * v[items]).sum(1)))
        clicks = (rng.random(ROWS) < p).astype(np.float32)
        np.savez(root / f"shard_{s:03d}.npz", user=users, item=items, click=clicks)


class ClickStream(IterableDataset):
    """Streams click logs shard by shard. The shards of an epoch are dealt out to the processes."""

    def __init__(self, files, rank, world, shuffle, seed=0):
        self.files, self.rank, self.world = files, rank, world
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def __iter__(self):
        rng = np.random.default_rng([self.seed, self.epoch])
        files = list(self.files)
        if self.shuffle:
            rng.shuffle(files)
        files = files[self.rank :: self.world]
        info = get_worker_info()
        if info is not None:
            files = files[info.id :: info.num_workers]
        for path in files:
            with np.load(path) as z:
                user, item, click = z["user"], z["item"], z["click"]
            order = rng.permutation(len(user)) if self.shuffle else np.arange(len(user))
            for i in order:
                yield int(user[i]), int(item[i]), float(click[i])


class TwoTower(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user, self.item = nn.Embedding(N_USERS, dim), nn.Embedding(N_ITEMS, dim)
        self.top = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        u, v = self.user(user), self.item(item)
        return self.top(torch.cat([u, v, u * v], dim=-1)).squeeze(-1)


@torch.no_grad()
def logloss(model, loader):
    model.eval()
    acc = torch.zeros(2, dtype=torch.float64)
    for user, item, click in loader:
        acc[0] += F.binary_cross_entropy_with_logits(model(user, item), click.float(), reduction="sum").double()
        acc[1] += len(click)
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=64)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)

    root = pathlib.Path("clicks")
    if rank == 0:
        write_shards(root)
    dist.barrier()
    files = sorted(root.glob("shard_*.npz"))
    train = ClickStream(files[:N_SHARDS], rank, world, shuffle=True, seed=4)
    held_out = ClickStream(files[N_SHARDS:], rank, world, shuffle=False)
    train_loader = DataLoader(train, batch_size=args.batch_size, num_workers=args.workers)
    val_loader = DataLoader(held_out, batch_size=128)

    model = DDP(TwoTower())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    log = []
    for epoch in range(args.epochs):
        train.epoch = epoch
        total, rows = 0.0, 0
        for user, item, click in train_loader:
            loss = F.binary_cross_entropy_with_logits(model(user, item), click.float())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(click)
            rows += len(click)
        stats = torch.tensor([total, rows], dtype=torch.float64)
        dist.all_reduce(stats)
        val = logloss(model, val_loader)
        log.append({"epoch": epoch, "rows": int(stats[1]), "train": (stats[0] / stats[1]).item(), "val": val})
        if rank == 0:
            print(json.dumps(log[-1]))
    if rank == 0:
        pathlib.Path("metrics.json").write_text(json.dumps(log))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
