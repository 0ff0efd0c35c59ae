"""Binary segmentation of blobs; numpy augmentation in loader workers; spawned processes."""
import random
import socket

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CFG = {
    "seed": 1234,
    "size": 32,
    "images": 224,
    "batch": 14,
    "workers": 2,
    "epochs": 4,
    "lr": 3e-3,
    "world": 2,
}


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class Blobs(Dataset):
    def __init__(self, count, size):
        rng = np.random.default_rng(77)
        yy, xx = np.mgrid[:size, :size]
        self.images = np.empty((count, size, size), np.float32)
        self.masks = np.empty((count, size, size), np.float32)
        for i in range(count):
            cy, cx = rng.uniform(10, size - 10, 2)
            r = rng.uniform(4, 9)
            mask = ((yy - cy) ** 2 + (xx - cx) ** 2 < r * r).astype(np.float32)
            self.masks[i] = mask
            self.images[i] = 0.8 * mask + 0.3 * np.sin(xx / 4 + i)

    def __len__(self):
        return len(self.images)

    def augment(self, image, mask):
        if np.random.rand() < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        if random.random() < 0.5:
            image, mask = image[::-1], mask[::-1]
        dy, dx = np.random.randint(-6, 7, 2)
        image, mask = np.roll(image, (dy, dx), (0, 1)), np.roll(mask, (dy, dx), (0, 1))
        gain = np.random.uniform(0.7, 1.3)
        noise = np.random.normal(0, 0.25, image.shape)
        return (gain * image + noise).astype(np.float32), mask.copy()

    def __getitem__(self, i):
        image, mask = self.augment(self.images[i], self.masks[i])
        return torch.from_numpy(image)[None], torch.from_numpy(mask)[None]


class SmallUNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.out = nn.Conv2d(2 * c, 1, 1)

    def forward(self, x):
        a = self.down(x)
        return self.out(torch.cat([a, self.up(self.deep(a))], 1))


class Trainer:
    def __init__(self, rank):
        self.rank = rank
        data = Blobs(CFG["images"], CFG["size"])
        self.sampler = DistributedSampler(data, seed=CFG["seed"], drop_last=True)
        self.loader = DataLoader(data, batch_size=CFG["batch"], sampler=self.sampler,
                                 num_workers=CFG["workers"], multiprocessing_context="fork",
                                 worker_init_fn=seed_worker)
        self.model = DDP(SmallUNet())
        self.optim = torch.optim.Adam(self.model.parameters(), lr=CFG["lr"])
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, CFG["epochs"])

    def step(self, image, mask):
        loss = F.binary_cross_entropy_with_logits(self.model(image), mask)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.detach()

    def fit(self):
        for epoch in range(CFG["epochs"]):
            self.sampler.set_epoch(epoch)
            losses = torch.stack([self.step(*batch) for batch in self.loader])
            self.sched.step()
            mean = losses.mean()
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"epoch {epoch:2d}  bce {mean.item() / CFG['world']:.4f}  steps {len(losses)}", flush=True)


def run(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=CFG["world"])
    torch.set_num_threads(1)
    torch.manual_seed(CFG["seed"] + rank)
    trainer = Trainer(rank)
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(run, args=(free,), nprocs=CFG["world"])
