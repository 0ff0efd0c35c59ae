"""Rank 0 runs a data preparation command, the others wait; then CSV parts are read rank by rank. Logs to a file a rank."""
import csv
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PREPARE = """
import csv, random, sys
random.seed(3)
for part in range(4):
    with open(f"{sys.argv[1]}/part-{part}.csv", "w", newline="") as f:
        w = csv.writer(f)
        w.writerow(["a", "b", "c", "target"])
        for _ in range(64):
            a, b, c = (random.uniform(-1, 1) for _ in range(3))
            w.writerow([a, b, c, a * b + c * c])
print("wrote 4 parts")
"""


def get_logger(rank, folder):
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler(folder / f"rank{rank}.log")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank{rank} %(levelname)s %(message)s"))
    logger.addHandler(handler)
    if rank == 0:
        logger.addHandler(logging.StreamHandler(sys.stdout))
    return logger


class CsvParts(Dataset):
    def __init__(self, folder):
        rows = []
        for path in sorted(folder.glob("part-*.csv")):
            with path.open() as f:
                rows += [[float(v) for v in r.values()] for r in csv.DictReader(f)]
        self.t = torch.tensor(rows)

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        return self.t[i, :3], self.t[i, 3:]


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    box = [tempfile.mkdtemp(prefix="prep-") if rank == 0 else None]
    if rank == 0:
        done = subprocess.run([sys.executable, "-c", PREPARE, box[0]], check=True, capture_output=True, text=True)
        print("prepare:", done.stdout.strip())
    dist.broadcast_object_list(box, src=0)  # also the signal that the files are complete
    folder = Path(box[0])
    log = get_logger(rank, folder)

    data = CsvParts(folder)
    torch.manual_seed(8)
    model = DDP(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        s = torch.zeros(())
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            s += loss.detach()
        dist.all_reduce(s)
        mean = s.item() / (len(loader) * world)
        sched.step(mean)  # the same number on every rank
        log.info("epoch %d mse %.5f lr %.4f", epoch, mean, opt.param_groups[0]["lr"])
    logging.shutdown()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
