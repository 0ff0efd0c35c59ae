"""Image classification, after the well-known reference script."""
import argparse
import os
import random
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="small image training")
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.05, type=float)
parser.add_argument("--world-size", default=1, type=int, help="number of processes for distributed training")
parser.add_argument("--dist-url", default="env://", type=str)
parser.add_argument("--dist-backend", default="gloo", type=str)
parser.add_argument("--multiprocessing-distributed", action="store_true")
parser.add_argument("--seed", default=8, type=int)


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        both = torch.tensor([self.sum, float(self.count)])
        dist.all_reduce(both)
        self.sum, self.count = both.tolist()

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    angle = 0.785 * y.float() + 0.1 * torch.randn(n, generator=g)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    img = torch.sin(1.2 * (angle.cos()[:, None, None] * xx + angle.sin()[:, None, None] * yy))
    return TensorDataset(img.unsqueeze(1) + 0.2 * torch.randn(n, 1, 12, 12, generator=g), y)


def make_model():
    return nn.Sequential(nn.Conv2d(1, 12, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, 4))


def main():
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    args.rank = 0
    if args.distributed:
        dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url)
        args.rank = dist.get_rank()
    model = make_model()
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.1)

    train_dataset, val_dataset = stripes(320, 1), stripes(80, 2)
    train_sampler = DistributedSampler(train_dataset) if args.distributed else None
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True) if args.distributed else None
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=train_sampler is None,
                              sampler=train_sampler)
    val_loader = DataLoader(val_dataset, batch_size=args.batch_size, shuffle=False, sampler=val_sampler)

    best = 0.0
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc = validate(val_loader, model, args)
        scheduler.step()
        is_best, best = acc > best, max(acc, best)
        if args.rank == 0:
            print(f" * Acc@1 {acc:.3f}", flush=True)
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "best": best}, "checkpoint.pth.tar")
            if is_best:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
    if args.distributed:
        dist.destroy_process_group()


@torch.no_grad()
def validate(loader, model, args):
    model.eval()
    top1 = AverageMeter()
    for images, target in loader:
        top1.update((model(images).argmax(1) == target).float().mean().item(), len(target))
    if args.distributed:
        top1.all_reduce()
    return top1.avg


if __name__ == "__main__":
    main()
