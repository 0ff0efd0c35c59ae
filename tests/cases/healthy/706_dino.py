"""DINO after facebookresearch/dino main_dino.py: multi-crop, centre all-reduced, teacher by momentum, last layer's gradients cancelled at first."""
import argparse
import copy
import math
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MultiCrop(Dataset):
    def __init__(self, n, local_crops):
        g = torch.Generator().manual_seed(21)
        centres = torch.randn(6, 32, generator=g)
        self.x = centres[torch.randint(0, 6, (n,), generator=g)] + 0.2 * torch.randn(n, 32, generator=g)
        self.local_crops = local_crops

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        crops = [x + 0.1 * torch.randn(32) for _ in range(2)]
        for _ in range(self.local_crops):
            keep = (torch.rand(32) > 0.5).float()
            crops.append(x * keep)
        return crops, 0


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, norm_last_layer=True):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 64), nn.GELU(), nn.Linear(64, 16))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        if norm_last_layer:
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
        return self.head(self.backbone(torch.cat(x)))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, warmup_teacher_temp, teacher_temp, warmup_epochs, nepochs, student_temp=0.1, center_momentum=0.9):
        super().__init__()
        self.student_temp, self.center_momentum, self.ncrops = student_temp, center_momentum, ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.schedule = np.concatenate((np.linspace(warmup_teacher_temp, teacher_temp, warmup_epochs), np.ones(nepochs - warmup_epochs) * teacher_temp))

    def forward(self, student_output, teacher_output, epoch):
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output - self.center) / self.schedule[epoch], dim=-1).detach().chunk(2)
        total, n = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                total = total + torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                n += 1
        self.update_center(teacher_output)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def cosine_scheduler(base, final, epochs, niter, warmup_epochs=0):
    w = np.linspace(0, base, warmup_epochs * niter) if warmup_epochs else np.array([])
    iters = np.arange(epochs * niter - len(w))
    return np.concatenate((w, final + 0.5 * (base - final) * (1 + np.cos(np.pi * iters / len(iters)))))


def clip_gradients(model, clip):
    for _, p in model.named_parameters():
        if p.grad is not None:
            norm = p.grad.data.norm(2)
            coef = clip / (norm + 1e-6)
            if coef < 1:
                p.grad.data.mul_(coef)


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def get_params_groups(model):
    reg, noreg = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (noreg if name.endswith(".bias") or p.ndim == 1 else reg).append(p)
    return [{"params": reg}, {"params": noreg, "weight_decay": 0.0}]


def has_batchnorms(model):
    return any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in model.modules())


def train_dino(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    dataset = MultiCrop(320, args.local_crops_number)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size_per_gpu, drop_last=True)

    make = lambda norm: MultiCropWrapper(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), DINOHead(32, args.out_dim, norm))
    student, teacher = make(True), make(True)
    assert not has_batchnorms(student)
    teacher_without_ddp = teacher
    student = nn.parallel.DistributedDataParallel(student)
    teacher_without_ddp.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    torch.manual_seed(args.seed + 1000 * (rank + 1))  # augmentation

    dino_loss = DINOLoss(args.out_dim, args.local_crops_number + 2, 0.04, 0.07, 2, args.epochs)
    optimizer = torch.optim.AdamW(get_params_groups(student))
    lr_schedule = cosine_scheduler(args.lr * args.batch_size_per_gpu * world / 64, 1e-5, args.epochs, len(loader), 1)
    wd_schedule = cosine_scheduler(0.04, 0.4, args.epochs, len(loader))
    momentum_schedule = cosine_scheduler(0.99, 1, args.epochs, len(loader))
    out = tempfile.mkdtemp() if rank == 0 else ""
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        seen = 0.0
        for it, (images, _) in enumerate(loader):
            it = len(loader) * epoch + it
            for i, g in enumerate(optimizer.param_groups):
                g["lr"] = lr_schedule[it]
                if i == 0:
                    g["weight_decay"] = wd_schedule[it]
            teacher_output = teacher(images[:2])
            student_output = student(images)
            loss = dino_loss(student_output, teacher_output, epoch)
            if not math.isfinite(loss.item()):
                raise SystemExit("Loss is not finite, stopping training")
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(student, args.clip_grad)
            cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
            optimizer.step()
            with torch.no_grad():
                m = momentum_schedule[it]
                for pq, pk in zip(student.module.parameters(), teacher_without_ddp.parameters()):
                    pk.data.mul_(m).add_((1 - m) * pq.detach().data)
            seen += loss.item()
        stat = torch.tensor(seen / len(loader))
        dist.all_reduce(stat)
        if rank == 0:
            save = {"student": student.state_dict(), "teacher": teacher.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1, "dino_loss": dino_loss.state_dict()}
            torch.save(save, os.path.join(out, "checkpoint.pth"))
            print(f"epoch {epoch} loss {stat.item() / world:.4f} lr {lr_schedule[it]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser("DINO")
    p.add_argument("--out_dim", default=32, type=int)
    p.add_argument("--batch_size_per_gpu", default=20, type=int)
    p.add_argument("--epochs", default=4, type=int)
    p.add_argument("--lr", default=2e-3, type=float)
    p.add_argument("--clip_grad", default=3.0, type=float)
    p.add_argument("--freeze_last_layer", default=1, type=int)
    p.add_argument("--local_crops_number", default=3, type=int)
    p.add_argument("--seed", default=0, type=int)
    train_dino(p.parse_args())
