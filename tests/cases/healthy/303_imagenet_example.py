"""Image classification in the manner of pytorch/examples/imagenet, cut down to fake 16x16 images on CPU."""
import argparse
import os
import shutil
import tempfile
import time
from enum import Enum

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim
import torch.utils.data
import torchvision.datasets as datasets
import torchvision.transforms as transforms
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Subset

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int, help="total over all processes")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=4, type=int)
best_acc1 = 0.0


def conv_bn(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


def tiny_net(classes):
    return nn.Sequential(conv_bn(3, 8), conv_bn(8, 16, 2), conv_bn(16, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def main():
    global best_acc1
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.batch_size = args.batch_size // args.world_size
    args.dir = tempfile.mkdtemp() if args.rank == 0 else None

    model = torch.nn.parallel.DistributedDataParallel(tiny_net(5))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    norm = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])
    aug = transforms.Compose([transforms.RandomHorizontalFlip(), norm])
    train_dataset = datasets.FakeData(128, (3, 16, 16), 5, aug)
    val_dataset = datasets.FakeData(51, (3, 16, 16), 5, norm, random_offset=5000)

    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.batch_size, sampler=val_sampler)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1,
                             "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, is_best, args.dir)
    if args.rank == 0:
        shutil.rmtree(args.dir)
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, args):
    batch_time, losses, top1 = AverageMeter("Time", ":6.3f"), AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
    losses.all_reduce()
    top1.all_reduce()
    if args.rank == 0:
        print(f"Epoch: [{epoch}] {losses} {top1} {batch_time}")


def validate(val_loader, model, criterion, args):
    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                output = model(images)
                losses.update(criterion(output, target).item(), images.size(0))
                top1.update(accuracy(output, target), images.size(0))

    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    model.eval()
    run_validate(val_loader)
    top1.all_reduce()
    losses.all_reduce()
    if len(val_loader.sampler) * args.world_size < len(val_loader.dataset):
        # the tail that does not divide: every process adds the same few images after the reduction
        aux = Subset(val_loader.dataset, range(len(val_loader.sampler) * args.world_size, len(val_loader.dataset)))
        run_validate(torch.utils.data.DataLoader(aux, batch_size=args.batch_size))
    if args.rank == 0:
        print(f" * {top1} {losses} over {top1.count:.0f} images")
    return top1.avg


def save_checkpoint(state, is_best, folder):
    filename = os.path.join(folder, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(folder, "model_best.pth.tar"))


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {avg" + self.fmt + "}").format(**self.__dict__)


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(1) == target).float().mean().item() * 100.0


if __name__ == "__main__":
    main()
