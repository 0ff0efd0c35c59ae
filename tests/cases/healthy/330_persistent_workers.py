"""Loader workers that live as long as the run; augmentation is drawn in the worker from its own seed."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Patches(Dataset):
    def __init__(self, n, train):
        rng = np.random.default_rng(0 if train else 1)
        self.labels = rng.integers(0, 3, n)
        base = np.stack([np.eye(12), np.fliplr(np.eye(12)), np.ones((12, 12)) / 3])
        self.images = (base[self.labels] + rng.normal(0, 0.3, (n, 12, 12))).astype(np.float32)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i]
        if self.train:
            dx, dy = np.random.randint(-2, 3, 2)
            img = np.roll(img, (dx, dy), (0, 1)) * np.float32(np.random.uniform(0.8, 1.2))
        return torch.from_numpy(np.ascontiguousarray(img)).unsqueeze(0), int(self.labels[i])


def seed_worker(_):
    np.random.seed(torch.initial_seed() % 2**32)  # base seed of this rank's loader + worker id


def build(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    train, test = Patches(288, True), Patches(66, False)
    sampler = DistributedSampler(train, shuffle=True, seed=5)
    gen = torch.Generator()
    gen.manual_seed(1234 + rank)
    loader = DataLoader(train, 12, sampler=sampler, num_workers=2, persistent_workers=True, prefetch_factor=2,
                        worker_init_fn=seed_worker, generator=gen)
    test_loader = DataLoader(test, 11, sampler=DistributedSampler(test, shuffle=False))
    return nn.parallel.DistributedDataParallel(net), sampler, loader, test_loader


def evaluate(model, loader):
    model.eval()
    c = torch.zeros(2, dtype=torch.long)
    with torch.inference_mode():
        for x, y in loader:
            c += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(c)
    model.train()
    return c.tolist()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model, sampler, loader, test_loader = build(rank)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        good, n = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: {good}/{n}")
    dist.destroy_process_group()
