import argparse
import copy
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MultiCropSet(Dataset):
    def __init__(self, n=1024, dim=32, classes=8, locals_=4):
        g = torch.Generator().manual_seed(11)
        self.proto = torch.randn(classes, dim, generator=g)
        self.y = torch.randint(0, classes, (n,), generator=g)
        self.x = self.proto[self.y] + 0.3 * torch.randn(n, dim, generator=g)
        self.locals_ = locals_

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        crops = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
        for _ in range(self.locals_):
            crops.append((x + 0.2 * torch.randn_like(x)) * (torch.rand_like(x) > 0.4))
        return crops, self.y[i]


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 64), nn.GELU(), nn.Linear(64, 32))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class MultiCropWrapper(nn.Module):
    def __init__(self, out_dim, dim=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
        self.head = DINOHead(64, out_dim)

    def forward(self, crops):
        return self.head(self.backbone(torch.cat(crops)))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, epochs, tt=(0.04, 0.07), student_temp=0.1, momentum=0.9):
        super().__init__()
        self.student_temp, self.momentum, self.ncrops = student_temp, momentum, ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.tt = np.linspace(tt[0], tt[1], epochs)

    def forward(self, student_out, teacher_out, epoch):
        s = (student_out / self.student_temp).chunk(self.ncrops)
        t = F.softmax((teacher_out - self.center) / self.tt[epoch], dim=-1).detach().chunk(2)
        total, n = 0.0, 0
        for iq, q in enumerate(t):
            for v in range(len(s)):
                if v == iq:
                    continue
                total = total + torch.sum(-q * F.log_softmax(s[v], dim=-1), dim=-1).mean()
                n += 1
        self.update_center(teacher_out)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher_out):
        c = teacher_out.sum(0, keepdim=True)
        dist.all_reduce(c)
        c = c / (len(teacher_out) * dist.get_world_size())
        self.center = self.center * self.momentum + c * (1 - self.momentum)


def clip_gradients(model, clip):
    for _, p in model.named_parameters():
        if p.grad is not None:
            coef = clip / (p.grad.norm(2) + 1e-6)
            if coef < 1:
                p.grad.mul_(coef)


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def cosine(base, final, total, warmup=0):
    w = np.linspace(0, base, warmup) if warmup else np.array([])
    it = np.arange(total - warmup)
    return np.concatenate([w, final + 0.5 * (base - final) * (1 + np.cos(np.pi * it / len(it)))])


def params_groups(model):
    reg, noreg = [], []
    for n, p in model.named_parameters():
        if not p.requires_grad:
            continue
        (noreg if n.endswith(".bias") or p.ndim == 1 else reg).append(p)
    return [{"params": reg}, {"params": noreg, "weight_decay": 0.0}]


@torch.no_grad()
def knn_eval(backbone, ds, rank, world):
    backbone.eval()
    f = F.normalize(backbone(ds.x), dim=-1)
    idx = torch.arange(rank, 512, world)
    bank, by = f[512:], ds.y[512:]
    pred = by[(f[idx] @ bank.T).topk(5).indices].mode(dim=1).values
    stat = torch.tensor([(pred == ds.y[idx]).sum(), len(idx)], dtype=torch.float64)
    dist.all_reduce(stat)
    backbone.train()
    return (stat[0] / stat[1]).item()


def train_dino(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    ds = MultiCropSet()
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, sampler=sampler, batch_size=args.batch, drop_last=True)
    student, teacher = MultiCropWrapper(args.out_dim), MultiCropWrapper(args.out_dim)
    teacher_without_ddp = teacher
    student = nn.parallel.DistributedDataParallel(student)
    teacher_without_ddp.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    torch.manual_seed(args.seed + 100 * (rank + 1))

    loss_fn = DINOLoss(args.out_dim, 6, args.epochs)
    opt = torch.optim.AdamW(params_groups(student))
    total = args.epochs * len(loader)
    lr_s = cosine(args.lr, 1e-5, total, warmup=len(loader))
    wd_s = cosine(0.04, 0.2, total)
    m_s = cosine(0.97, 1.0, total)
    out = Path("dino_out")
    if rank == 0:
        out.mkdir(exist_ok=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2, dtype=torch.float64)
        for it, (crops, _) in enumerate(loader):
            it = len(loader) * epoch + it
            for i, g in enumerate(opt.param_groups):
                g["lr"] = lr_s[it]
                if i == 0:
                    g["weight_decay"] = wd_s[it]
            teacher_out = teacher(crops[:2])
            student_out = student(crops)
            loss = loss_fn(student_out, teacher_out, epoch)
            if not math.isfinite(loss.item()):
                print("Loss is {}, stopping training".format(loss.item()))
                sys.exit(1)
            opt.zero_grad()
            loss.backward()
            clip_gradients(student, 3.0)
            cancel_gradients_last_layer(epoch, student, 1)
            opt.step()
            with torch.no_grad():
                m = m_s[it]
                for q, k in zip(student.module.parameters(), teacher_without_ddp.parameters()):
                    k.data.mul_(m).add_((1 - m) * q.detach().data)
            meter += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(meter)
        acc = knn_eval(teacher_without_ddp.backbone, ds, rank, world)
        if rank == 0:
            torch.save({"student": student.state_dict(), "teacher": teacher.state_dict(),
                        "optimizer": opt.state_dict(), "epoch": epoch + 1,
                        "dino_loss": loss_fn.state_dict()}, out / "checkpoint.pth")
            log = {"epoch": epoch, "train_loss": (meter[0] / meter[1]).item(), "knn": acc, "lr": lr_s[it]}
            with (out / "log.txt").open("a") as f:
                f.write(json.dumps(log) + "\n")
            print(log, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--out_dim", type=int, default=128)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    train_dino(p.parse_args())
