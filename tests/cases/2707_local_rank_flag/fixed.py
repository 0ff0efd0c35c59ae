"""Semantic segmentation of blobs. Single process by default, or several with a launcher."""
import argparse
import logging
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

_logger = logging.getLogger("seg")


def parse_args():
    parser = argparse.ArgumentParser(description="Train segmentation network")
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--batch-size", default=16, type=int, help="images per process")
    parser.add_argument("--lr", default=0.02, type=float)
    parser.add_argument("--seed", default=304, type=int)
    parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", -1)), type=int, help="set by the launcher")
    parser.add_argument("--output", default="output")
    return parser.parse_args()


class Blobs(Dataset):
    def __init__(self, count, seed, size=32):
        self.count, self.seed, self.size = count, seed, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.RandomState(self.seed + index)
        yy, xx = np.mgrid[0:self.size, 0:self.size]
        label = np.zeros((self.size, self.size), np.int64)
        for cls in (1, 2):
            cy, cx, r = rng.randint(6, 26), rng.randint(6, 26), rng.randint(4, 8)
            label[(yy - cy) ** 2 + (xx - cx) ** 2 < r * r] = cls
        image = np.stack([(label == 1) * 1.0, (label == 2) * 1.0]) + 0.7 * rng.randn(2, self.size, self.size)
        return torch.from_numpy(image.astype(np.float32)), torch.from_numpy(label)


def conv_bn(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class SmallSeg(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.hi = conv_bn(2, 12)
        self.lo = nn.Sequential(nn.MaxPool2d(2), conv_bn(12, 24), conv_bn(24, 24))
        self.cls = nn.Conv2d(36, classes, 1)

    def forward(self, x):
        hi = self.hi(x)
        lo = F.interpolate(self.lo(hi), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.cls(torch.cat([hi, lo], 1))


def reduce_sum(tensor, args):
    if args.distributed:
        dist.all_reduce(tensor)
    return tensor


@torch.no_grad()
def validate(model, loader, args):
    model.eval()
    confusion = torch.zeros(3, 3, dtype=torch.float64)
    for image, label in loader:
        pred = model(image).argmax(1)
        confusion += torch.bincount((label * 3 + pred).flatten(), minlength=9).view(3, 3).double()
    model.train()
    reduce_sum(confusion, args)
    inter = confusion.diag()
    return (inter / (confusion.sum(0) + confusion.sum(1) - inter)).mean().item()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    args.distributed = args.local_rank != -1
    args.rank, args.world_size = 0, 1
    if args.distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if args.rank == 0 else logging.WARNING, format="%(message)s")
    _logger.info("local_rank %d, %d process(es)", args.local_rank, args.world_size)
    torch.manual_seed(args.seed + args.rank)

    model = SmallSeg()
    if args.distributed:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if torch.cuda.is_available() else model
        model = nn.parallel.DistributedDataParallel(model)
    train_set, val_set = Blobs(384, 0), Blobs(96, 50_000)
    train_sampler = DistributedSampler(train_set, seed=args.seed) if args.distributed else None
    val_sampler = DistributedSampler(val_set, shuffle=False) if args.distributed else None
    train_loader = DataLoader(train_set, args.batch_size, shuffle=train_sampler is None, sampler=train_sampler,
                              drop_last=True)
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_sampler)
    optimizer = torch.optim.SGD(model.parameters(), args.lr * args.world_size, momentum=0.9, weight_decay=5e-4)
    max_iters = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, max_iters, power=0.9)

    best = 0.0
    for epoch in range(args.epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        meter = torch.zeros(2, dtype=torch.float64)
        for image, label in train_loader:
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            meter += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        reduce_sum(meter, args)
        net = model.module if args.distributed else model
        miou = validate(net, val_loader, args)
        _logger.info("epoch %d loss %.4f mIoU %.4f", epoch, meter[0] / meter[1], miou)
        if miou > best and args.rank == 0:
            os.makedirs(args.output, exist_ok=True)
            torch.save(net.state_dict(), os.path.join(args.output, "best.pth"))
        best = max(best, miou)

    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
