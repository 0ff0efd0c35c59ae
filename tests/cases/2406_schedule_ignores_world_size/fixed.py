import argparse
import logging
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("train")


class Shapes(Dataset):
    """16x16 pictures of a bar, a cross or a box at a random place, with noise."""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        label = i % 3
        img = 0.4 * torch.randn(1, 16, 16, generator=g)
        r, c = torch.randint(2, 9, (2,), generator=g).tolist()
        if label == 0:
            img[0, r + 2, c : c + 5] += 1.5
        elif label == 1:
            img[0, r + 2, c : c + 5] += 1.2
            img[0, r : r + 5, c + 2] += 1.2
        else:
            img[0, [r, r + 4], c : c + 5] += 1.2
            img[0, r : r + 5, [c, c + 4]] += 1.2
        return img, label


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(24, 3)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1))


def cosine_with_warmup(optimizer, warmup_steps, total_steps):
    def scale(step):
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, scale)


def run_eval(model, loader):
    model.eval()
    counts = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        for img, label in loader:
            counts[0] += (model(img).argmax(1) == label).sum()
            counts[1] += len(label)
    dist.all_reduce(counts)
    model.train()
    return counts[0].item() / counts[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--warmup-ratio", type=float, default=0.05)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(0)

    train_ds, val_ds = Shapes(1536, seed=1), Shapes(384, seed=2)
    sampler = DistributedSampler(train_ds, shuffle=True, seed=8)
    train_loader = DataLoader(train_ds, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(val_ds, batch_size=64, sampler=DistributedSampler(val_ds, shuffle=False))

    model = DDP(SmallNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    steps_per_epoch = len(train_loader)
    total_steps = steps_per_epoch * args.epochs
    scheduler = cosine_with_warmup(optimizer, int(args.warmup_ratio * total_steps), total_steps)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2, dtype=torch.float64)
        for img, label in train_loader:
            loss = F.cross_entropy(model(img), label, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(seen)
        acc = run_eval(model, val_loader)
        lr = scheduler.get_last_lr()[0]
        log.info("epoch %d loss %.4f acc %.3f lr %.2e", epoch, seen[0] / seen[1], acc, lr)
    if rank == 0:
        torch.save(model.module.state_dict(), "shapes.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
