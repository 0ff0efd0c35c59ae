"""MAE pre-training after facebookresearch/mae: engine, MetricLogger, per-iteration lr, loss scaler wrapper."""
import argparse
import datetime
import math
import os
import sys
import tempfile
import time
from collections import defaultdict, deque

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SmoothedValue:
    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque, self.total, self.count, self.fmt = deque(maxlen=window_size), 0.0, 0, fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        if not dist.is_initialized():
            return
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        t = t.tolist()
        self.count, self.total = int(t[0]), t[1]

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg)


class MetricLogger:
    def __init__(self, delimiter="\t"):
        self.meters, self.delimiter = defaultdict(SmoothedValue), delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if v is None:
                continue
            self.meters[k].update(v.item() if isinstance(v, torch.Tensor) else v)

    def __str__(self):
        return self.delimiter.join(f"{n}: {m}" for n, m in self.meters.items())

    def synchronize_between_processes(self):
        for meter in self.meters.values():
            meter.synchronize_between_processes()

    def log_every(self, iterable, print_freq, header=""):
        start = end = time.time()
        iter_time, data_time = SmoothedValue(fmt="{global_avg:.4f}"), SmoothedValue(fmt="{global_avg:.4f}")
        for i, obj in enumerate(iterable):
            data_time.update(time.time() - end)
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0 or i == len(iterable) - 1:
                eta = datetime.timedelta(seconds=int(iter_time.global_avg * (len(iterable) - i)))
                print(f"{header} [{i}/{len(iterable)}] eta: {eta} {self} time: {iter_time} data: {data_time}")
            end = time.time()
        print(f"{header} Total time: {time.time() - start:.2f}s")


def setup_for_distributed(is_master):
    import builtins
    builtin_print = builtins.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_master or force:
            builtin_print(*args, **kwargs)

    builtins.print = print


def all_reduce_mean(x):
    world_size = dist.get_world_size()
    if world_size > 1:
        x = torch.tensor(x)
        dist.all_reduce(x)
        x /= world_size
        return x.item()
    return x


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad if clip_grad else 1e9)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()


class MaskedAutoencoder(nn.Module):
    def __init__(self, tokens=16, patch=8, dim=32):
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, tokens + 1, dim), requires_grad=False)
        t = torch.arange(tokens + 1).float()[:, None] / 10000 ** (torch.arange(dim // 2) / (dim // 2))
        self.pos.data.copy_(torch.cat([t.sin(), t.cos()], 1))
        self.enc = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.dec = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, patch)
        nn.init.normal_(self.cls, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, x, mask_ratio=0.75):
        N, L, _ = x.shape
        z = self.embed(x) + self.pos[:, 1:]
        keep = int(L * (1 - mask_ratio))
        noise = torch.rand(N, L)
        order = noise.argsort(1)
        restore = order.argsort(1)
        z = z.gather(1, order[:, :keep, None].expand(-1, -1, z.size(-1)))
        mask = torch.ones(N, L)
        mask[:, :keep] = 0
        mask = mask.gather(1, restore)
        z = self.enc(torch.cat([(self.cls + self.pos[:, :1]).expand(N, -1, -1), z], 1))
        full = torch.cat([z[:, 1:], self.mask_token.expand(N, L - keep, -1)], 1)
        full = full.gather(1, restore[..., None].expand(-1, -1, z.size(-1)))
        out = self.head(self.dec(torch.cat([z[:, :1], full], 1) + self.pos)[:, 1:])
        loss = ((out - x) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum(), out, mask


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)))
    for g in optimizer.param_groups:
        g["lr"] = lr * g.get("lr_scale", 1.0)
    return lr


def train_one_epoch(model, data_loader, optimizer, epoch, loss_scaler, args):
    model.train(True)
    metric_logger = MetricLogger(delimiter="  ")
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    for it, (samples,) in enumerate(metric_logger.log_every(data_loader, 5, f"Epoch: [{epoch}]")):
        if it % accum_iter == 0:
            adjust_learning_rate(optimizer, it / len(data_loader) + epoch, args)
        model.require_backward_grad_sync = (it + 1) % accum_iter == 0
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training", force=True)
            sys.exit(1)
        loss /= accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters(), clip_grad=3.0, update_grad=(it + 1) % accum_iter == 0)
        if (it + 1) % accum_iter == 0:
            optimizer.zero_grad()
        metric_logger.update(loss=loss_value, lr=optimizer.param_groups[0]["lr"])
        all_reduce_mean(loss_value)
    metric_logger.synchronize_between_processes()
    print("Averaged stats:", metric_logger)
    return {k: m.global_avg for k, m in metric_logger.meters.items()}


def main():
    p = argparse.ArgumentParser("MAE pre-training", add_help=False)
    p.add_argument("--batch_size", default=16, type=int)
    p.add_argument("--epochs", default=4, type=int)
    p.add_argument("--accum_iter", default=2, type=int)
    p.add_argument("--mask_ratio", default=0.75, type=float)
    p.add_argument("--blr", default=3e-2, type=float)
    p.add_argument("--lr", default=None, type=float)
    p.add_argument("--min_lr", default=0.0, type=float)
    p.add_argument("--warmup_epochs", default=1, type=int)
    p.add_argument("--seed", default=0, type=int)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    setup_for_distributed(rank == 0)
    torch.manual_seed(args.seed + rank)
    np.random.seed(args.seed + rank)

    g = torch.Generator().manual_seed(9)
    base = torch.randn(8, 16, 8, generator=g)
    images = base[torch.randint(0, 8, (384,), generator=g)] + 0.1 * torch.randn(384, 16, 8, generator=g)
    dataset = TensorDataset(images)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size, drop_last=True)

    model = MaskedAutoencoder()
    model_without_ddp = model
    eff = args.batch_size * args.accum_iter * world
    if args.lr is None:
        args.lr = args.blr * eff / 256
    print("effective batch size: %d, actual lr: %.2e" % (eff, args.lr))
    model = nn.parallel.DistributedDataParallel(model)
    model_without_ddp = model.module
    decay = [q for n, q in model_without_ddp.named_parameters() if q.requires_grad and q.ndim > 1]
    rest = [q for n, q in model_without_ddp.named_parameters() if q.requires_grad and q.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = NativeScaler()
    out = tempfile.mkdtemp() if rank == 0 else None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = train_one_epoch(model, loader, optimizer, epoch, loss_scaler, args)
        if rank == 0:
            torch.save({"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "scaler": loss_scaler.state_dict()}, os.path.join(out, f"checkpoint-{epoch}.pth"))
            with open(os.path.join(out, "log.txt"), "a") as f:
                f.write(str({**{f"train_{k}": v for k, v in stats.items()}, "epoch": epoch}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
