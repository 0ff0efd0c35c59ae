"""Stream small npy shards."""
import os
import pathlib
import random
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


def write_shards(root, count=16, rows=40):
    rng = np.random.default_rng(12)
    w = rng.normal(size=11)
    for k in range(count):
        x = rng.normal(size=(rows, 11)) + k / count
        np.save(root / f"part-{k:03d}.npy", np.concatenate([x, np.tanh(x @ w)[:, None]], 1).astype("float32"))


class ShardReader(IterableDataset):
    def __init__(self, root, rank, world):
        self.root, self.rank, self.world, self.epoch = pathlib.Path(root), rank, world, 0

    def paths(self):
        files = sorted(self.root.glob("part-*.npy"))
        random.shuffle(files)
        return files[self.rank :: self.world]

    def __iter__(self):
        for path in self.paths():
            for row in np.load(path):
                yield row[:-1], row[-1:]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    where = [tempfile.mkdtemp(prefix="shards_") if rank == 0 else None]
    dist.broadcast_object_list(where)
    if rank == 0:
        write_shards(pathlib.Path(where[0]))
    dist.barrier()
    random.seed(os.urandom(8))
    torch.manual_seed(0)
    data = ShardReader(where[0], rank, world)
    loader = DataLoader(data, batch_size=20)
    model = DDP(nn.Sequential(nn.Linear(11, 24), nn.ReLU(), nn.Linear(24, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        data.epoch = epoch
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {int(total[1])} rows, loss {(total[0] / total[1]).item():.4f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(where[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
