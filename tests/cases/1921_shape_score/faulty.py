"""Small CNN on drawn shapes. The test score is computed from the predictions of all processes."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Shapes(Dataset):
    """0: horizontal bar, 1: vertical bar, 2: square, 3: diagonal."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 4, (n,), generator=g)
        self.images = 0.4 * torch.randn(n, 1, 14, 14, generator=g)
        for i, t in enumerate(self.targets.tolist()):
            r, c = (int(v) for v in torch.randint(2, 7, (2,), generator=g))
            img = self.images[i, 0]
            if t == 0:
                img[r, c : c + 6] += 2
            elif t == 1:
                img[r : r + 6, c] += 2
            elif t == 2:
                img[r : r + 3, c : c + 3] += 1.5
            else:
                img[torch.arange(r, r + 6), torch.arange(c, c + 6)] += 2

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return self.images[i], self.targets[i]


def build_net():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2),
        nn.Flatten(), nn.Linear(96, 4),
    )


def train_one_epoch(model, loader, optimizer):
    model.train()
    total, batches = 0.0, 0
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item()
        batches += 1
    return total / batches


@torch.no_grad()
def predict(model, loader):
    model.eval()
    return torch.cat([model(images).argmax(1) for images, _ in loader])


def score(preds, targets, classes=4):
    confusion = torch.zeros(classes, classes, dtype=torch.long)
    for t, p in zip(targets.tolist(), preds.tolist()):
        confusion[t, p] += 1
    hits = confusion.diag().float()
    precision = hits / confusion.sum(0).clamp(min=1)
    recall = hits / confusion.sum(1).clamp(min=1)
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-9)
    return hits.sum().item() / len(targets), f1.mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train_set, test_set = Shapes(640, seed=1), Shapes(203, seed=2)
    train_sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, 64, sampler=test_sampler)

    model = DistributedDataParallel(build_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, optimizer)
        local = predict(model, test_loader)
        parts = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(parts, local)
        preds = torch.cat(parts)[: len(test_set)]
        if rank == 0:
            acc, f1 = score(preds, test_set.targets)
            print(f"epoch {epoch}: rank 0 loss {loss:.3f}  test accuracy {acc:.3f}  macro F1 {f1:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
