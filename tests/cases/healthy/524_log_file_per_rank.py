"""Per-rank logging with the logging module; rank-dependent augmentation."""
import logging
import os
import pathlib
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def make_logger(rank):
    pathlib.Path("logs").mkdir(exist_ok=True)
    logger = logging.getLogger(f"train.rank{rank}")
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler(f"logs/rank_{rank:02d}.log", mode="w")
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(message)s"))
    logger.addHandler(handler)
    if rank == 0:
        logger.addHandler(logging.StreamHandler())
    return logger


class Shapes(Dataset):
    """bars, horizontal or vertical, shifted and flipped at random"""

    def __init__(self, n=400):
        rng = np.random.default_rng(1)
        self.label = rng.integers(0, 2, n)
        self.offset = rng.integers(1, 8, n)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        image = np.zeros((9, 9), dtype=np.float32)
        image[self.offset[i]] = 1
        if random.random() < 0.5:
            image = image[::-1]
        image = np.roll(image, random.randint(-1, 1), 0) + 0.3 * np.random.randn(9, 9)
        if self.label[i]:
            image = image.T
        return torch.from_numpy(np.ascontiguousarray(image, dtype=np.float32))[None], int(self.label[i])


def main(seed=42):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = make_logger(rank)
    torch.manual_seed(seed)
    model = DDP(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(150, 2)))
    for s in (random.seed, np.random.seed, torch.manual_seed):
        s(seed + rank)
    data = Shapes()
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        mine = torch.zeros(3)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            mine += torch.tensor([loss.item() * len(y), (out.argmax(1) == y).sum().item(), len(y)])
        log.info("epoch %d own loss %.4f", epoch, mine[0] / mine[2])
        everyone = mine.clone()
        dist.all_reduce(everyone)
        if rank == 0:
            log.info("epoch %d loss %.4f accuracy %.3f over %d ranks", epoch, everyone[0] / everyone[2], everyone[1] / everyone[2], world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
