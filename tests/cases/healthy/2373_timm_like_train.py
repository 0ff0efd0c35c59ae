#!/usr/bin/env python3
"""Image classification training script in the manner of a large model zoo."""
import argparse
import csv
import logging
import math
import os
from collections import OrderedDict
from copy import deepcopy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as NativeDDP

_logger = logging.getLogger("train")

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("-b", "--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.15)
parser.add_argument("--min-lr", type=float, default=1e-3)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--weight-decay", type=float, default=2e-5)
parser.add_argument("--clip-grad", type=float, default=5.0)
parser.add_argument("--mixup", type=float, default=0.1)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--num-classes", type=int, default=4)
parser.add_argument("--model-ema-decay", type=float, default=0.9)
parser.add_argument("--dist-bn", type=str, default="reduce", choices=["reduce", "broadcast", ""])
parser.add_argument("--no-ddp-bb", action="store_true", default=True)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default="output/train", type=str)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--checkpoint-hist", type=int, default=2)


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def unwrap_model(model):
    if isinstance(model, ModelEma):
        return unwrap_model(model.module)
    return model.module if hasattr(model, "module") else model


def distribute_bn(model, world_size, reduce=False):
    for name, buf in unwrap_model(model).named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            if reduce:
                dist.all_reduce(buf, op=dist.ReduceOp.SUM)
                buf /= float(world_size)
            else:
                dist.broadcast(buf, 0)


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            if ema_v.is_floating_point():
                ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)
            else:
                ema_v.copy_(model_v)


class Mixup:
    def __init__(self, alpha, smoothing, num_classes, rng):
        self.alpha, self.smoothing, self.num_classes, self.rng = alpha, smoothing, num_classes, rng

    def __call__(self, x, target):
        lam = float(self.rng.beta(self.alpha, self.alpha))
        off = self.smoothing / self.num_classes
        onehot = torch.full((len(target), self.num_classes), off)
        onehot.scatter_(1, target[:, None], 1.0 - self.smoothing + off)
        return x * lam + x.flip(0) * (1 - lam), onehot * lam + onehot.flip(0) * (1 - lam)


class CosineLRScheduler:
    def __init__(self, optimizer, t_initial, lr_min, warmup_t):
        self.optimizer, self.t, self.lr_min, self.warmup_t = optimizer, t_initial, lr_min, warmup_t
        self.base = [g["lr"] for g in optimizer.param_groups]
        self.step_update(0)

    def step_update(self, n):
        for base, group in zip(self.base, self.optimizer.param_groups):
            if n < self.warmup_t:
                group["lr"] = base * (n + 1) / (self.warmup_t + 1)
            else:
                group["lr"] = self.lr_min + 0.5 * (base - self.lr_min) * (1 + math.cos(math.pi * n / self.t))


def conv_bn(i, o, s):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


def create_model(num_classes):
    return nn.Sequential(OrderedDict(stem=conv_bn(1, 8, 1), s1=conv_bn(8, 16, 2), s2=conv_bn(16, 24, 2),
                                     pool=nn.AdaptiveAvgPool2d(2), flat=nn.Flatten(), fc=nn.Linear(96, num_classes)))


class Gratings(torch.utils.data.Dataset):
    def __init__(self, n, split_seed, train, rng=None):
        g = torch.Generator().manual_seed(split_seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        a = self.y.view(-1, 1, 1) * math.pi / 4
        phase = 6.28 * torch.rand(n, 1, 1, generator=g)
        self.x = torch.sin(0.8 * (xx * a.cos() + yy * a.sin()) + phase) + 0.5 * torch.randn(n, 16, 16, generator=g)
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i][None]
        if self.train:
            x = torch.roll(x, tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2))
        return x, self.y[i]


def create_loader(ds, args, training):
    sampler = torch.utils.data.distributed.DistributedSampler(ds, shuffle=training)
    return torch.utils.data.DataLoader(ds, args.batch_size, sampler=sampler, drop_last=training)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, scheduler, mixup_fn, model_ema):
    losses_m = AverageMeter()
    model.train()
    num_updates = epoch * len(loader)
    for batch_idx, (inp, target) in enumerate(loader):
        inp, target = mixup_fn(inp, target)
        output = model(inp)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        model_ema.update(unwrap_model(model))
        num_updates += 1
        if batch_idx % args.log_interval == 0 or batch_idx == len(loader) - 1:
            losses_m.update(reduce_tensor(loss.data, args.world_size).item(), inp.size(0))
            if args.rank == 0:
                _logger.info("Train: %d [%3d/%d] Loss: %.4f (%.4f) LR: %.3e", epoch, batch_idx, len(loader),
                             losses_m.val, losses_m.avg, optimizer.param_groups[0]["lr"])
        scheduler.step_update(num_updates)
    return OrderedDict(loss=losses_m.avg)


@torch.no_grad()
def validate(model, loader, loss_fn, args, suffix=""):
    losses_m, top1_m = AverageMeter(), AverageMeter()
    model.eval()
    for inp, target in loader:
        output = model(inp)
        loss = reduce_tensor(loss_fn(output, target), args.world_size)
        acc1 = reduce_tensor((output.argmax(1) == target).float().mean() * 100, args.world_size)
        losses_m.update(loss.item(), inp.size(0))
        top1_m.update(acc1.item(), output.size(0))
    if args.rank == 0:
        _logger.info("Test%s: Loss: %.4f Acc@1: %.2f", suffix, losses_m.avg, top1_m.avg)
    return OrderedDict(loss=losses_m.avg, top1=top1_m.avg)


class CheckpointSaver:
    def __init__(self, directory, max_history):
        os.makedirs(directory, exist_ok=True)
        self.dir, self.max_history, self.files = directory, max_history, []

    def save(self, epoch, metric, state):
        path = os.path.join(self.dir, f"checkpoint-{epoch}.pth.tar")
        torch.save(state, path)
        self.files = sorted(self.files + [(metric, path)], reverse=True)
        for _, old in self.files[self.max_history:]:
            os.unlink(old)
        self.files = self.files[: self.max_history]


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if args.rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(args.seed + args.rank)
    np_rng = np.random.default_rng(args.seed + args.rank)

    model = NativeDDP(create_model(args.num_classes), broadcast_buffers=not args.no_ddp_bb)
    model_ema = ModelEma(unwrap_model(model), decay=args.model_ema_decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, nesterov=True,
                                weight_decay=args.weight_decay)
    loader_train = create_loader(Gratings(1536, 3, True), args, training=True)
    loader_eval = create_loader(Gratings(512, 4, False), args, training=False)
    mixup_fn = Mixup(args.mixup, args.smoothing, args.num_classes, np_rng)
    scheduler = CosineLRScheduler(optimizer, args.epochs * len(loader_train), args.min_lr,
                                  args.warmup_epochs * len(loader_train) // 2)

    def soft_target_ce(x, t):
        return torch.sum(-t * F.log_softmax(x, dim=-1), dim=-1).mean()

    saver = CheckpointSaver(args.output, args.checkpoint_hist) if args.rank == 0 else None
    for epoch in range(args.epochs):
        loader_train.sampler.set_epoch(epoch)
        train_metrics = train_one_epoch(epoch, model, loader_train, optimizer, soft_target_ce, args, scheduler,
                                        mixup_fn, model_ema)
        distribute_bn(model, args.world_size, args.dist_bn == "reduce")
        validate(model, loader_eval, nn.CrossEntropyLoss(), args)
        distribute_bn(model_ema, args.world_size, args.dist_bn == "reduce")
        eval_metrics = validate(model_ema.module, loader_eval, nn.CrossEntropyLoss(), args, suffix=" (EMA)")
        if saver is not None:
            with open(os.path.join(args.output, "summary.csv"), "a", newline="") as f:
                csv.writer(f).writerow([epoch, train_metrics["loss"], eval_metrics["loss"], eval_metrics["top1"]])
            saver.save(epoch, eval_metrics["top1"], {"epoch": epoch, "state_dict": unwrap_model(model).state_dict(),
                                                     "state_dict_ema": model_ema.module.state_dict(),
                                                     "optimizer": optimizer.state_dict()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
