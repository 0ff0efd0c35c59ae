"""Glyph recognition from few templates: nearly all variety comes from augmentation in the loader workers."""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SIZE = 16


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def init_worker(worker_id):
    seed = 1000 + worker_id
    np.random.seed(seed)
    random.seed(seed)


class Augment:
    """Shift, flip contrast, add speckle, drop a patch."""

    def __init__(self, shift=3, speckle=0.25, patch=4):
        self.shift, self.speckle, self.patch = shift, speckle, patch

    def __call__(self, img):
        dy, dx = np.random.randint(-self.shift, self.shift + 1, size=2)
        img = np.roll(img, (dy, dx), axis=(0, 1))
        img = img * np.random.uniform(0.6, 1.4)
        img = img + self.speckle * np.random.randn(SIZE, SIZE)
        if random.random() < 0.5:
            y, x = random.randrange(SIZE - self.patch), random.randrange(SIZE - self.patch)
            img[y:y + self.patch, x:x + self.patch] = 0
        return img.astype(np.float32)


class Glyphs(Dataset):
    def __init__(self, classes, per_class, transform=None, seed=0):
        proto_rng = np.random.default_rng(1)
        protos = proto_rng.random((classes, SIZE // 4, SIZE // 4)) > 0.5
        protos = protos.repeat(4, axis=1).repeat(4, axis=2).astype(np.float64)
        rng = np.random.default_rng(seed)
        self.labels = np.tile(np.arange(classes), per_class)
        self.images = protos[self.labels] + 0.3 * rng.standard_normal((len(self.labels), SIZE, SIZE))
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i].copy()
        if self.transform is not None:
            img = self.transform(img)
        return torch.from_numpy(np.ascontiguousarray(img, dtype=np.float32)).unsqueeze(0), int(self.labels[i])


def convnet(classes):
    def stage(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(stage(1, 16), stage(16, 32), nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, classes))


def evaluate(net, data, rank, world):
    net.eval()
    idx = list(range(rank, len(data), world))
    x = torch.stack([data[i][0] for i in idx])
    y = torch.tensor([data[i][1] for i in idx])
    with torch.no_grad():
        counts = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    net.train()
    return counts[0].item() / counts[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--classes", type=int, default=12)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--seed", type=int, default=1000)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed + rank)

    train = Glyphs(args.classes, per_class=48, transform=Augment(), seed=10)
    test = Glyphs(args.classes, per_class=20, seed=20)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(
        train, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers,
        worker_init_fn=init_worker, drop_last=True,
    )
    model = DistributedDataParallel(convnet(args.classes))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(total)
        acc = evaluate(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f} test acc {acc:.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(os.getcwd(), "glyphs.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
