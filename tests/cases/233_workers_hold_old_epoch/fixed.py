"""Augmentation that is reproducible: keyed by (epoch, index). Loading happens in a worker process."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class KeyedAugmentation(Dataset):
    def __init__(self, n, seed=0):
        rng = np.random.default_rng(seed)
        self.angle = rng.uniform(0, np.pi, n)
        self.label = (self.angle > np.pi / 2).astype(np.int64)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.angle)

    def __getitem__(self, i):
        rng = np.random.default_rng((self.epoch, i))
        yy, xx = np.mgrid[-4:5, -4:5] + rng.uniform(-1, 1, (2, 1, 1))
        d = xx * np.sin(self.angle[i]) - yy * np.cos(self.angle[i])
        img = np.exp(-(d**2)) + rng.normal(0, 0.2, d.shape)
        return torch.from_numpy(img.astype(np.float32)).unsqueeze(0), int(self.label[i])


def make_loader(dataset, sampler, batch):
    return DataLoader(dataset, batch, sampler=sampler, num_workers=1)


def make_model():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 9, 2))


def main(epochs=4, batch=16):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(make_model())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = KeyedAugmentation(256)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = make_loader(dataset, sampler, batch)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        dataset.set_epoch(epoch)
        stats = torch.zeros(3)
        for img, label in loader:
            out = model(img)
            loss = nn.functional.cross_entropy(out, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stats += torch.tensor([loss.item() * len(label), (out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {(stats[0] / stats[2]).item():.4f} accuracy {(stats[1] / stats[2]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
