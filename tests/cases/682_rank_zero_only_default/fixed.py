"""rank_zero utilities with a module-level rank, as in several frameworks; checkpoints and csv logs go through them."""
import csv
import functools
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def _detect_rank():
    for key in ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        if key in os.environ:
            return int(os.environ[key])
    return 0


def rank_zero_only(fn):
    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        if rank_zero_only.rank == 0:
            return fn(*args, **kwargs)
        return None
    return wrapped


rank_zero_only.rank = _detect_rank()


class CSVLogger:
    def __init__(self, folder):
        self.path = folder / "metrics.csv"

    @rank_zero_only
    def log(self, **row):
        new = not self.path.exists()
        with open(self.path, "a", newline="") as f:
            w = csv.DictWriter(f, row)
            if new:
                w.writeheader()
            w.writerow(row)


class ModelCheckpoint:
    def __init__(self, folder):
        self.folder = folder

    @rank_zero_only
    def save(self, model, optimizer, epoch):
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, self.folder / "last.ckpt")


def survival(n):
    g = torch.Generator().manual_seed(10)
    x = torch.randn(n, 9, generator=g)
    return TensorDataset(x, ((x @ torch.randn(9, generator=g)) > 0).float().unsqueeze(1))


def main(epochs=4):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = pathlib.Path(tempfile.gettempdir()) / f"run_{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    logger, checkpoint = CSVLogger(folder), ModelCheckpoint(folder)
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = survival(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        logger.log(epoch=epoch, loss=round((total[0] / total[1]).item(), 4))
        checkpoint.save(model, optimizer, epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
