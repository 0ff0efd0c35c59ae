"""Semantic segmentation with void borders (label 255)."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOID = 255


class Rects(Dataset):
    """One rectangle an image; some annotations have a void frame."""

    def __init__(self, n=160):
        g = torch.Generator().manual_seed(90)
        self.images = 0.3 * torch.randn(n, 3, 12, 12, generator=g)
        self.masks = torch.zeros(n, 12, 12, dtype=torch.long)
        for i in range(n):
            top, left, cls = torch.randint(1, 6, (3,), generator=g).tolist()
            cls = cls % 3 + 1
            self.images[i, cls - 1, top : top + 5, left : left + 5] += 1.0
            self.masks[i, top : top + 5, left : left + 5] = cls
            if i % 37 == 36:
                self.masks[i, 0, :] = VOID
                self.masks[i, :, 0] = VOID

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.masks[i]


def make_criterion():
    weight = torch.tensor([0.4, 1.0, 1.0, 1.0])
    return nn.CrossEntropyLoss(weight=weight)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1))
    model = DDP(net)
    criterion = make_criterion()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = Rects()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        iou = torch.zeros(2, 4)
        for image, mask in loader:
            logits = model(image)
            loss = criterion(logits, mask)
            opt.zero_grad()
            loss.backward()
            opt.step()
            pred, valid = logits.argmax(1), mask != VOID
            for c in range(4):
                a, b = (pred == c) & valid, mask == c
                iou[0, c] += (a & b).sum()
                iou[1, c] += (a | b).sum()
        dist.all_reduce(iou)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mIoU {(iou[0] / iou[1].clamp(min=1)).mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
