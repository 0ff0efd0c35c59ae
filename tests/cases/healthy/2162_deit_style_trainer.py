#!/usr/bin/env python3
""" Image classification with repeated augmentation, mixup, distillation and EMA weights. """
import argparse
import copy
import logging
import math
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

_logger = logging.getLogger("train")
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--warmup-updates", type=int, default=6)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--model-ema-decay", type=float, default=0.9)
parser.add_argument("--aug-repeats", type=int, default=2)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default="output")
NUM_CLASSES = 6


class Shapes(Dataset):
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(7)
        self.protos = torch.randn(NUM_CLASSES, 3, 12, 12, generator=g)
        g.manual_seed(seed)
        self.y = torch.randint(NUM_CLASSES, (n,), generator=g)
        self.x = self.protos[self.y] * 0.5 + torch.randn(n, 3, 12, 12, generator=g) * 0.8
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train:
            x = x + 0.2 * torch.randn_like(x)
        return x, self.y[i]


class RepeatAugSampler(Sampler):
    """Every drawn sample appears `repeats` times over the ranks of one global step, each copy augmented on its own."""

    def __init__(self, dataset, num_replicas, rank, repeats, seed):
        self.n, self.num_replicas, self.rank, self.repeats, self.seed = len(dataset), num_replicas, rank, repeats, seed
        self.epoch = 0
        self.num_samples = math.ceil(self.n * repeats / num_replicas)
        self.num_selected = self.n // num_replicas

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_selected

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        idx = torch.randperm(self.n, generator=g).repeat_interleave(self.repeats).tolist()
        idx += idx[: self.num_samples * self.num_replicas - len(idx)]
        return iter(idx[self.rank::self.num_replicas][: self.num_selected])


class OrderedShard(Sampler):
    def __init__(self, dataset, num_replicas, rank):
        self.indices = range(rank, len(dataset), num_replicas)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class ModelEma:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            if e.is_floating_point():
                e.mul_(self.decay).add_(m, alpha=1 - self.decay)
            else:
                e.copy_(m)


def make_model():
    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(block(3, 16), block(16, 32), nn.Flatten(), nn.Linear(32 * 9, NUM_CLASSES))


def distribute_bn(model, world_size):
    for name, buf in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buf)
            buf /= world_size


def mixup(x, y, alpha, dist_beta):
    target = F.one_hot(y, NUM_CLASSES).float()
    lam = dist_beta.sample().item()
    return lam * x + (1 - lam) * x.flip(0), lam * target + (1 - lam) * target.flip(0)


def train_one_epoch(epoch, model, ema, loader, optimizer, args, teacher, beta):
    model.train()
    updates = epoch * len(loader)
    for x, y in loader:
        lr = args.lr * min(1.0, (updates + 1) / args.warmup_updates)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, target = mixup(x, y, args.mixup, beta)
        with torch.no_grad():
            hard = teacher(x).argmax(1)
        logits = model(x)
        loss = 0.5 * torch.sum(-target * F.log_softmax(logits, -1), -1).mean() + 0.5 * F.cross_entropy(logits, hard)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        ema.update(model.module)
    value = loss.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    stat = torch.zeros(3)
    for x, y in loader:
        out = model(x)
        stat += torch.stack([F.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum().float(), torch.tensor(float(len(y)))])
    dist.all_reduce(stat)
    return OrderedDict(loss=stat[0].item() / stat[2].item(), top1=100 * stat[1].item() / stat[2].item())


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(args.seed + rank)
    train_set, eval_set = Shapes(256, 1, True), Shapes(131, 2, False)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(432, NUM_CLASSES, bias=False)).eval().requires_grad_(False)
    teacher[1].weight.copy_(train_set.protos.flatten(1))        # matched filter
    sampler = RepeatAugSampler(train_set, world, rank, args.aug_repeats, args.seed)
    loader_train = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    loader_eval = DataLoader(eval_set, 32, sampler=OrderedShard(eval_set, world, rank))
    model = nn.parallel.DistributedDataParallel(make_model(), broadcast_buffers=False)
    ema = ModelEma(model.module, args.model_ema_decay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    beta = torch.distributions.Beta(args.mixup, args.mixup)
    best = None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_loss = train_one_epoch(epoch, model, ema, loader_train, optimizer, args, teacher, beta)
        distribute_bn(model, world)
        distribute_bn(ema.module, world)
        raw, avg = validate(model.module, loader_eval), validate(ema.module, loader_eval)
        _logger.info(f"epoch {epoch} last loss {train_loss:.3f} eval {raw['loss']:.3f} top1 {raw['top1']:.1f} ema top1 {avg['top1']:.1f}")
        if (best is None or avg["top1"] > best) and rank == 0:
            os.makedirs(args.output, exist_ok=True)
            torch.save({"state_dict": model.module.state_dict(), "state_dict_ema": ema.module.state_dict(), "epoch": epoch},
                       os.path.join(args.output, "model_best.pth.tar"))
        best = avg["top1"] if best is None else max(best, avg["top1"])
    _logger.info(f"*** best ema top1 {best:.1f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
