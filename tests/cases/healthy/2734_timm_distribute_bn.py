import argparse
import csv
import json
import logging
import math
import os
import time
from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as NativeDDP

_logger = logging.getLogger("train")


def reduce_tensor(t, n):
    rt = t.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def distribute_bn(model, world_size, reduce=False):
    for name, buf in (model.module if hasattr(model, "module") else model).named_buffers(recurse=True):
        if ("running_mean" in name) or ("running_var" in name):
            if reduce:
                dist.all_reduce(buf, op=dist.ReduceOp.SUM)
                buf /= float(world_size)
            else:
                dist.broadcast(buf, 0)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, v, n=1):
        self.sum += v * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.module.state_dict().values()):
            e.copy_(self.decay * e + (1.0 - self.decay) * m)


class OrderedDistributedSampler(torch.utils.data.Sampler):
    def __init__(self, dataset):
        self.n, self.rank, self.world = len(dataset), dist.get_rank(), dist.get_world_size()
        self.num_samples = int(math.ceil(self.n / self.world))

    def __iter__(self):
        ix = list(range(self.n))
        ix += ix[:self.num_samples * self.world - self.n]
        return iter(ix[self.rank:self.num_samples * self.world:self.world])

    def __len__(self):
        return self.num_samples


class NativeScaler:
    def __call__(self, loss, optimizer, clip_grad, parameters, need_update=True):
        loss.backward()
        if need_update:
            nn.utils.clip_grad_norm_(parameters, clip_grad)
            optimizer.step()


class Net(nn.Module):
    def __init__(self, c=6):
        super().__init__()
        self.stem = nn.Conv1d(4, 24, 5, padding=2, bias=False)
        self.bn1 = nn.BatchNorm1d(24)
        self.conv = nn.Conv1d(24, 24, 5, padding=2, bias=False)
        self.bn2 = nn.BatchNorm1d(24)
        self.drop_path = 0.1
        self.fc = nn.Linear(24, c)

    def forward(self, x):
        x = F.relu(self.bn1(self.stem(x)))
        y = F.relu(self.bn2(self.conv(x)))
        if self.training:
            keep = (torch.rand(len(x), 1, 1) >= self.drop_path).float()
            y = y * keep / (1 - self.drop_path)
        return self.fc((x + y).mean(-1))


def make_data(n, seed):
    g = torch.Generator().manual_seed(50)
    kern = torch.randn(6, 4, 5, generator=g)
    g.manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    x = torch.randn(n, 4, 32, generator=g)
    for r in range(4):
        x[:, :, r * 8:r * 8 + 5] += kern[y]
    return torch.utils.data.TensorDataset(x, y)


def validate(model, loader, loss_fn, world, suffix=""):
    lm, am = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            loss = reduce_tensor(loss_fn(out, y), world)
            acc = reduce_tensor((out.argmax(1) == y).float().mean() * 100, world)
            lm.update(loss.item(), len(x))
            am.update(acc.item(), len(x))
    return OrderedDict([("loss", lm.avg), ("top1" + suffix, am.avg)])


def update_summary(epoch, tm, em, filename, write_header):
    row = OrderedDict(epoch=epoch)
    row.update([("train_" + k, v) for k, v in tm.items()])
    row.update([("eval_" + k, v) for k, v in em.items()])
    with open(filename, mode="a") as f:
        w = csv.DictWriter(f, fieldnames=row.keys())
        if write_header:
            w.writeheader()
        w.writerow(row)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("-b", "--batch-size", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--grad-accum-steps", type=int, default=2)
    ap.add_argument("--dist-bn", default="reduce")
    ap.add_argument("--seed", type=int, default=42)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo", init_method="env://")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    model = NativeDDP(model, broadcast_buffers=False)
    model_ema = ModelEmaV2(model.module, decay=0.9)
    ds, dv = make_data(960, 1), make_data(192, 2)
    sampler = torch.utils.data.distributed.DistributedSampler(ds)
    loader = torch.utils.data.DataLoader(ds, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    loader_eval = torch.utils.data.DataLoader(dv, batch_size=args.batch_size, sampler=OrderedDistributedSampler(dv))
    train_loss, val_loss = nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()
    scaler = NativeScaler()
    updates_per_epoch = math.ceil(len(loader) / args.grad_accum_steps)
    num_updates, best = 0, None
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        losses = AverageMeter()
        accum = args.grad_accum_steps
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            need_update = (i + 1) % accum == 0 or i == len(loader) - 1

            def _backward():
                loss = train_loss(model(x), y) / accum
                scaler(loss, optimizer, 3.0, model.parameters(), need_update=need_update)
                return loss.detach() * accum

            if not need_update:
                with model.no_sync():
                    loss = _backward()
            else:
                loss = _backward()
            losses.update(reduce_tensor(loss, world).item(), len(x))
            if not need_update:
                continue
            num_updates += 1
            optimizer.zero_grad()
            model_ema.update(model)
            frac = num_updates / (args.epochs * updates_per_epoch)
            for g in optimizer.param_groups:
                g["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, frac)))
        distribute_bn(model, world, args.dist_bn == "reduce")
        ev = validate(model, loader_eval, val_loss, world)
        distribute_bn(model_ema, world, args.dist_bn == "reduce")
        ema_ev = validate(model_ema.module, loader_eval, val_loss, world, suffix=" (EMA)")
        if rank == 0:
            _logger.info("%d train %.4f eval %s ema %s", epoch, losses.avg, dict(ev), dict(ema_ev))
            update_summary(epoch, {"loss": losses.avg}, ev, "summary.csv", epoch == 0)
            if best is None or ema_ev["top1 (EMA)"] > best:
                best = ema_ev["top1 (EMA)"]
                torch.save({"state_dict": model.module.state_dict(), "state_dict_ema": model_ema.module.state_dict(),
                            "optimizer": optimizer.state_dict(), "epoch": epoch, "metric": best}, "model_best.pth.tar")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
