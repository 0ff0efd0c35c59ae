"""Self-distillation with multi-crop, centring and a momentum teacher."""
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def cosine_scheduler(base, final, epochs, niter, warmup_epochs=0, start=0.0):
    w = np.linspace(start, base, warmup_epochs * niter) if warmup_epochs else np.array([])
    it = np.arange(epochs * niter - len(w))
    s = final + 0.5 * (base - final) * (1 + np.cos(np.pi * it / len(it)))
    return np.concatenate((w, s))


class MultiCrop:
    def __init__(self, n_local):
        self.n_local = n_local

    def crop(self, x, size):
        h = x.shape[-1] - size
        i, j = int(torch.randint(0, h + 1, ())), int(torch.randint(0, h + 1, ()))
        return x[..., i:i + size, j:j + size] + 0.15 * torch.randn(x.shape[0], 1, size, size)

    def __call__(self, batch):
        x = torch.stack([b[0] for b in batch])
        crops = [self.crop(x, 14) for _ in range(2)] + [self.crop(x, 8) for _ in range(self.n_local)]
        return crops, torch.stack([b[1] for b in batch])


class Backbone(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 24, 3, 1, 1), nn.GELU(), nn.Conv2d(24, d, 3, 2, 1), nn.GELU(),
                                 nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(d))

    def forward(self, x):
        return self.net(x)


class Head(nn.Module):
    def __init__(self, d, out):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, 32))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, out, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class MultiCropWrapper(nn.Module):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x):
        if not isinstance(x, list):
            x = [x]
        idx = torch.cumsum(torch.unique_consecutive(torch.tensor([i.shape[-1] for i in x]), return_counts=True)[1], 0)
        start, feats = 0, []
        for end in idx.tolist():
            feats.append(self.backbone(torch.cat(x[start:end])))
            start = end
        return self.head(torch.cat(feats))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, temp_w, temp, warm, nepochs):
        super().__init__()
        self.ncrops = ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.schedule = np.concatenate((np.linspace(temp_w, temp, warm), np.ones(nepochs - warm) * temp))

    def forward(self, student, teacher, epoch):
        s = (student / 0.1).chunk(self.ncrops)
        t = F.softmax((teacher - self.center) / self.schedule[epoch], dim=-1).detach().chunk(2)
        total, n = 0.0, 0
        for iq, q in enumerate(t):
            for v in range(len(s)):
                if v == iq:
                    continue
                total = total + torch.sum(-q * F.log_softmax(s[v], dim=-1), dim=-1).mean()
                n += 1
        self.update_center(teacher)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher):
        c = torch.sum(teacher, dim=0, keepdim=True)
        dist.all_reduce(c)
        c = c / (len(teacher) * dist.get_world_size())
        self.center = self.center * 0.9 + c * 0.1


def get_params_groups(model):
    reg, noreg = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (noreg if name.endswith(".bias") or p.dim() == 1 else reg).append(p)
    return [{"params": reg}, {"params": noreg, "weight_decay": 0.0}]


def cancel_gradients_last_layer(epoch, model, freeze):
    if epoch >= freeze:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angle = torch.arange(6).view(6, 1, 1) * math.pi / 6
    protos = 1.5 * torch.sin(1.4 * (torch.cos(angle) * xx + torch.sin(angle) * yy)).unsqueeze(1)
    y = torch.randint(6, (n,), generator=g)
    return TensorDataset(protos[y] + 0.3 * torch.randn(n, 1, 16, 16, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    np.random.seed(rank)
    epochs, bs, out_dim, freeze = 5, 32, 64, 1
    ds = data(640, 3)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=bs, sampler=sampler, drop_last=True, collate_fn=MultiCrop(3))
    student = MultiCropWrapper(Backbone(), Head(48, out_dim))
    teacher = MultiCropWrapper(Backbone(), Head(48, out_dim))
    student = nn.parallel.DistributedDataParallel(student)
    teacher.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    criterion = DINOLoss(out_dim, 5, 0.04, 0.06, 2, epochs)
    opt = torch.optim.AdamW(get_params_groups(student))
    lr_s = cosine_scheduler(2e-3, 1e-5, epochs, len(loader), 1)
    wd_s = cosine_scheduler(0.01, 0.04, epochs, len(loader))
    m_s = cosine_scheduler(0.99, 1, epochs, len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        stat = torch.zeros(2)
        for it, (images, _) in enumerate(loader):
            it = len(loader) * epoch + it
            for i, g in enumerate(opt.param_groups):
                g["lr"] = lr_s[it]
                if i == 0:
                    g["weight_decay"] = wd_s[it]
            t_out = teacher(images[:2])
            s_out = student(images)
            loss = criterion(s_out, t_out, epoch)
            if not math.isfinite(loss.item()):
                print("Loss is {}, stopping training".format(loss.item()), flush=True)
                sys.exit(1)
            opt.zero_grad()
            loss.backward()
            for p in student.parameters():
                if p.grad is not None:
                    coef = 3.0 / (p.grad.norm(2) + 1e-6)
                    if coef < 1:
                        p.grad.mul_(coef)
            cancel_gradients_last_layer(epoch, student, freeze)
            opt.step()
            with torch.no_grad():
                for ps, pt in zip(student.module.parameters(), teacher.parameters()):
                    pt.data.mul_(m_s[it]).add_((1 - m_s[it]) * ps.detach().data)
            stat += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stat)
        if rank == 0:
            row = {"epoch": epoch, "train_loss": (stat[0] / stat[1]).item(), "lr": lr_s[it]}
            print(json.dumps(row))
            Path("dino").mkdir(exist_ok=True)
            torch.save({"student": student.state_dict(), "teacher": teacher.state_dict(), "optimizer": opt.state_dict(),
                        "dino_loss": criterion.state_dict(), "epoch": epoch + 1}, "dino/checkpoint.pth")
            with open("dino/log.txt", "a") as f:
                f.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
