"""Per-pixel classification; the confusion matrix gives IoU over the whole validation set."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = 3


class Squares(Dataset):
    def __init__(self, n, seed, size=14):
        g = torch.Generator().manual_seed(seed)
        self.mask = torch.zeros(n, size, size, dtype=torch.long)
        for k in range(n):
            for cls in (1, 2):
                r, c, h, w = torch.randint(2, 8, (4,), generator=g).tolist()
                self.mask[k, r : r + h, c : c + w] = cls
        self.image = self.mask.float().unsqueeze(1) - 1 + 0.6 * torch.randn(n, 1, size, size, generator=g)

    def __len__(self):
        return len(self.mask)

    def __getitem__(self, k):
        return self.image[k], self.mask[k]


class IoU:
    def __init__(self):
        self.matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)

    def add(self, pred, target):
        index = target.flatten() * CLASSES + pred.flatten()
        self.matrix += torch.bincount(index, minlength=CLASSES**2).view(CLASSES, CLASSES)

    def sync(self):
        dist.all_reduce(self.matrix)

    def value(self):
        m = self.matrix.double()
        return (m.diag() / (m.sum(0) + m.sum(1) - m.diag()).clamp_min(1)).mean().item()


@torch.no_grad()
def validate(net, loader):
    net.eval()
    iou = IoU()
    for image, mask in loader:
        iou.add(net(image).argmax(1), mask)
        iou.sync()
    net.train()
    return iou


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, CLASSES, 1)
    )
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train_set, val_set = Squares(160, 1), Squares(64, 2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=8, sampler=DistributedSampler(val_set, shuffle=False))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, mask in train_loader:
            loss = F.cross_entropy(model(image), mask)
            opt.zero_grad()
            loss.backward()
            opt.step()
        iou = validate(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: mean IoU {iou.value():.4f} over {iou.matrix.sum().item()} pixels", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
