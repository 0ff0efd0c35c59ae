"""Self-distillation without labels on short signals: student under DDP, teacher as a moving average, multi-crop, centring."""
import copy
import json
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH, LR, OUT_DIM, FREEZE_LAST, LOCAL, CLIP = 5, 32, 2e-3, 24, 1, 3, 1.0


class Signals(Dataset):
    """sines of six frequencies, random phase; global crops hold 48 samples, local ones 24"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(6, (n,), generator=g)
        phase = torch.rand(n, 1, generator=g) * 6.283
        t = torch.arange(64.0)
        self.x = torch.sin(phase + t * (0.15 + 0.22 * self.y[:, None])) + 0.2 * torch.randn(n, 64, generator=g)

    def __len__(self):
        return len(self.y)

    def crop(self, x, size):
        s = int(torch.randint(0, 65 - size, (1,)))
        return x[s:s + size] * (0.8 + 0.4 * torch.rand(1)) + 0.1 * torch.randn(size)

    def __getitem__(self, i):
        return [self.crop(self.x[i], 48) for _ in range(2)] + [self.crop(self.x[i], 24) for _ in range(LOCAL)]


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(1, width, 9, 2), nn.GELU(), nn.Conv1d(width, width, 5), nn.GELU())
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 16))
        self.last_layer = nn.Linear(16, OUT_DIM, bias=False)

    def features(self, x):
        return self.norm(self.backbone(x[:, None]).mean(2))

    def forward(self, crops):
        sizes = torch.unique_consecutive(torch.tensor([c.size(-1) for c in crops]), return_counts=True)[1]
        out, start = [], 0
        for n in sizes.tolist():                                   # one pass a resolution
            out.append(self.features(torch.cat(crops[start:start + n])))
            start += n
        return self.last_layer(F.normalize(self.mlp(torch.cat(out)), dim=-1))


class DINOLoss(nn.Module):
    def __init__(self, student_temp=0.1, teacher_temp=0.05, momentum=0.9):
        super().__init__()
        self.ts, self.tt, self.m = student_temp, teacher_temp, momentum
        self.register_buffer("center", torch.zeros(1, OUT_DIM))

    def forward(self, student, teacher):
        s = (student / self.ts).chunk(2 + LOCAL)
        t = F.softmax((teacher - self.center) / self.tt, -1).detach().chunk(2)
        terms = [-(q * F.log_softmax(p, -1)).sum(-1).mean() for i, q in enumerate(t) for j, p in enumerate(s) if i != j]
        self.update_center(teacher)
        return sum(terms) / len(terms)

    @torch.no_grad()
    def update_center(self, teacher):
        batch = teacher.sum(0, keepdim=True)
        dist.all_reduce(batch)
        self.center.lerp_(batch / (len(teacher) * dist.get_world_size()), 1 - self.m)


def cosine(base, final, steps):
    return [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]


def param_groups(model):
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
    return [{"params": decay}, {"params": plain, "weight_decay": 0.0}]


@torch.no_grad()
def linear_probe_free(teacher, bank, test, rank, world):
    """nearest neighbour accuracy, each rank takes its part of the test signals against the whole bank"""
    b = F.normalize(teacher.features(bank.x), dim=1)
    t = F.normalize(teacher.features(test.x[rank::world]), dim=1)
    hit = (bank.y[(t @ b.T).argmax(1)] == test.y[rank::world]).sum()
    dist.all_reduce(hit)
    return hit.item() / len(test)


def train_dino():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data, bank, test = Signals(1024, 1), Signals(300, 2), Signals(101, 3)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    student = nn.parallel.DistributedDataParallel(Net())
    teacher = copy.deepcopy(student.module).eval()                 # after wrapping: equal on all ranks
    for p in teacher.parameters():
        p.requires_grad = False
    criterion = DINOLoss()
    optimizer = torch.optim.AdamW(param_groups(student), lr=LR)
    total = EPOCHS * len(loader)
    lr_schedule, wd_schedule, mom_schedule = cosine(LR, 1e-5, total), cosine(0.04, 0.2, total), cosine(0.96, 1.0, total)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        student.train()
        meter = torch.zeros(2)
        for it, crops in enumerate(loader, start=epoch * len(loader)):
            for i, group in enumerate(optimizer.param_groups):
                group["lr"] = lr_schedule[it]
                if i == 0:
                    group["weight_decay"] = wd_schedule[it]
            with torch.no_grad():
                target = teacher(crops[:2])
            loss = criterion(student(crops), target)
            if not math.isfinite(loss.item()):
                print(f"loss is {loss.item()}, stopping", flush=True)
                sys.exit(1)
            optimizer.zero_grad()
            loss.backward()
            for p in student.parameters():                         # per-tensor clipping
                p.grad.mul_(torch.clamp(CLIP / (p.grad.norm() + 1e-6), max=1.0))
            if epoch < FREEZE_LAST:
                for n, p in student.named_parameters():
                    if "last_layer" in n:
                        p.grad = None
            optimizer.step()
            with torch.no_grad():
                m = mom_schedule[it]
                for s, t in zip(student.module.parameters(), teacher.parameters()):
                    t.mul_(m).add_((1 - m) * s.detach())
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        accuracy = linear_probe_free(teacher, bank, test, rank, world)
        if rank == 0:
            torch.save({"student": student.state_dict(), "teacher": teacher.state_dict(), "optimizer": optimizer.state_dict(),
                        "dino_loss": criterion.state_dict(), "epoch": epoch + 1}, "checkpoint.pth.tmp")
            os.replace("checkpoint.pth.tmp", "checkpoint.pth")
            with open("log.txt", "a") as f:
                f.write(json.dumps({"epoch": epoch, "loss": (meter[0] / meter[1]).item(), "nn": accuracy}) + "\n")
            print(f"epoch {epoch} loss {meter[0] / meter[1]:.4f} 1-nn {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train_dino()
