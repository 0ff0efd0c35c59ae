"""Image classification from compressed shard files."""
import argparse
import functools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def write_shards(folder, shards, per_shard):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(77)
    for s in range(shards):
        labels = rng.integers(0, 6, per_shard)
        images = rng.integers(0, 90, (per_shard, 24, 24, 3), dtype=np.uint8)
        for img, label in zip(images, labels):
            img[4 * (label // 3) + 4 : 4 * (label // 3) + 14, 5:15, label % 3] += 30
        np.savez_compressed(folder / f"shard-{s:02d}.npz", images=images, labels=labels)


class ShardedImages(Dataset):
    def __init__(self, folder, per_shard):
        self.files = sorted(folder.glob("shard-*.npz"))
        self.per_shard = per_shard

    def __len__(self):
        return len(self.files) * self.per_shard

    def read(self, shard):
        with np.load(self.files[shard]) as z:
            return z["images"], z["labels"]

    def __getitem__(self, i):
        shard, row = divmod(i, self.per_shard)
        images, labels = self.read(shard)
        img = torch.from_numpy(images[row].astype(np.float32) / 127.5 - 1).permute(2, 0, 1)
        return img, int(labels[row])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 5, stride=2)
        self.bn = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12 * 10 * 10, 6)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


def epochs(loader, sampler, count):
    for epoch in range(count):
        sampler.set_epoch(epoch)
        yield epoch, loader


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folder", type=Path, default=Path("shards"))
    ap.add_argument("--shards", type=int, default=4)
    ap.add_argument("--per-shard", type=int, default=192)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        write_shards(args.folder, args.shards, args.per_shard)
    dist.barrier()
    torch.manual_seed(0)
    data = ShardedImages(args.folder, args.per_shard)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    model = DDP(Classifier())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    for epoch, batches in epochs(loader, sampler, args.epochs):
        stats = torch.zeros(3)
        for x, y in batches:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stats += torch.tensor([loss.item() * len(y), (logits.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stats)
        if rank == 0:
            loss, acc = (stats[:2] / stats[2]).tolist()
            print(f"epoch {epoch}: train loss {loss:.4f} train accuracy {acc:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
