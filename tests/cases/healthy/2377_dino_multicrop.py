"""Self distillation without labels with several crops."""
import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def cosine_scheduler(base, final, epochs, niter, warmup_epochs=0, start=0.0):
    warm = np.linspace(start, base, warmup_epochs * niter) if warmup_epochs else np.array([])
    it = np.arange(epochs * niter - len(warm))
    rest = final + 0.5 * (base - final) * (1 + np.cos(np.pi * it / len(it)))
    return np.concatenate((warm, rest))


def get_params_groups(model):
    reg = [p for n, p in model.named_parameters() if p.requires_grad and not (n.endswith(".bias") or p.dim() == 1)]
    noreg = [p for n, p in model.named_parameters() if p.requires_grad and (n.endswith(".bias") or p.dim() == 1)]
    return [{"params": reg}, {"params": noreg, "weight_decay": 0.0}]


class Textures(torch.utils.data.Dataset):
    def __init__(self, n, seed, crops=True, n_local=2):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 4, (n,), generator=g)
        yy, xx = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
        ang = self.label.view(-1, 1, 1) * math.pi / 4
        self.img = torch.sin(0.9 * (xx * ang.cos() + yy * ang.sin()) + 6.28 * torch.rand(n, 1, 1, generator=g))
        self.img = (self.img + 0.3 * torch.randn(n, 20, 20, generator=g))[:, None]
        self.crops, self.n_local = crops, n_local

    def __len__(self):
        return len(self.label)

    def _crop(self, img, size):
        y, x = torch.randint(0, 20 - size + 1, (2,)).tolist()
        c = img[:, y:y + size, x:x + size]
        return c * (0.7 + 0.6 * torch.rand(1)) + 0.1 * torch.randn_like(c)

    def __getitem__(self, i):
        img = self.img[i]
        if not self.crops:
            return img[:, 2:18, 2:18], self.label[i], i
        return [self._crop(img, 16) for _ in range(2)] + [self._crop(img, 8) for _ in range(self.n_local)], self.label[i]


class Backbone(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 5, 2, 2), nn.GroupNorm(4, 16), nn.GELU(), nn.Conv2d(16, d, 3, 2, 1),
                                 nn.GroupNorm(4, d), nn.GELU())

    def forward(self, x):
        f = self.net(x)
        return torch.cat([f.mean((2, 3)), f.amax((2, 3))], 1)


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, norm_last_layer=True):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 64), nn.GELU(), nn.Linear(64, 24))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(24, out_dim, bias=False))
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
        x = x if isinstance(x, list) else [x]
        sizes = torch.tensor([t.shape[-1] for t in x])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0).tolist()
        start, out = 0, []
        for end in ends:
            out.append(self.backbone(torch.cat(x[start:end])))
            start = end
        return self.head(torch.cat(out))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, teacher_temp=0.05, student_temp=0.1, center_momentum=0.9):
        super().__init__()
        self.ncrops, self.tt, self.st, self.cm = ncrops, teacher_temp, student_temp, center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        student = (student_output / self.st).chunk(self.ncrops)
        teacher = F.softmax((teacher_output - self.center) / self.tt, dim=-1).detach().chunk(2)
        total, n = 0, 0
        for iq, q in enumerate(teacher):
            for v in range(len(student)):
                if v == iq:
                    continue
                total = total + torch.sum(-q * F.log_softmax(student[v], dim=-1), dim=-1).mean()
                n += 1
        self.update_center(teacher_output)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.cm + batch_center * (1 - self.cm)


def clip_gradients(model, clip):
    for _, p in model.named_parameters():
        if p.grad is not None:
            coef = clip / (p.grad.data.norm(2) + 1e-6)
            if coef < 1:
                p.grad.data.mul_(coef)


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def train_one_epoch(student, teacher, dino_loss, loader, optimizer, lr_s, wd_s, mom_s, epoch, args):
    stats = torch.zeros(2, dtype=torch.float64)
    for i, (images, _) in enumerate(loader):
        it = len(loader) * epoch + i
        for g, group in enumerate(optimizer.param_groups):
            group["lr"] = lr_s[it]
            if g == 0:
                group["weight_decay"] = wd_s[it]
        with torch.no_grad():
            teacher_output = teacher(images[:2])
        loss = dino_loss(student(images), teacher_output)
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"Loss is {loss.item()}, stopping training")
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(student, args.clip_grad)
        cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
        optimizer.step()
        with torch.no_grad():
            m = mom_s[it]
            for pq, pk in zip(student.module.parameters(), teacher.parameters()):
                pk.data.mul_(m).add_((1 - m) * pq.detach().data)
        stats += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(stats)
    return {"loss": (stats[0] / stats[1]).item(), "lr": optimizer.param_groups[0]["lr"]}


@torch.no_grad()
def knn_accuracy(backbone, train_set, val_set, k=10):
    rank, world = dist.get_rank(), dist.get_world_size()

    def features(ds):
        idx = range(rank, len(ds), world)
        x = torch.stack([ds[i][0] for i in idx])
        parts = [None] * world
        dist.all_gather_object(parts, (F.normalize(backbone(x), dim=1), ds.label[list(idx)]))
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    fx, fy = features(train_set)
    vx, vy = features(val_set)
    near = fy[(vx @ fx.t()).topk(k, dim=1).indices]
    return (near.mode(1).values == vy).float().mean().item()


def main():
    p = argparse.ArgumentParser("DINO")
    p.add_argument("--out_dim", default=64, type=int)
    p.add_argument("--momentum_teacher", default=0.97, type=float)
    p.add_argument("--batch_size_per_gpu", default=32, type=int)
    p.add_argument("--epochs", default=4, type=int)
    p.add_argument("--freeze_last_layer", default=1, type=int)
    p.add_argument("--lr", default=0.012, type=float)
    p.add_argument("--clip_grad", default=3.0, type=float)
    p.add_argument("--seed", default=0, type=int)
    p.add_argument("--output_dir", default="dino_out")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    out = Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)

    dataset = Textures(1024, 1)
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True)
    loader = torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size=args.batch_size_per_gpu, drop_last=True)
    student = MultiCropWrapper(Backbone(), DINOHead(64, args.out_dim))
    teacher = MultiCropWrapper(Backbone(), DINOHead(64, args.out_dim))
    student = nn.parallel.DistributedDataParallel(student)
    teacher.load_state_dict(student.module.state_dict())
    for prm in teacher.parameters():
        prm.requires_grad = False
    dino_loss = DINOLoss(args.out_dim, 4)
    optimizer = torch.optim.AdamW(get_params_groups(student))
    n = len(loader)
    lr_s = cosine_scheduler(args.lr * args.batch_size_per_gpu * world / 256.0, 1e-5, args.epochs, n, warmup_epochs=1)
    wd_s = cosine_scheduler(0.04, 0.2, args.epochs, n)
    mom_s = cosine_scheduler(args.momentum_teacher, 1, args.epochs, n)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_stats = train_one_epoch(student, teacher, dino_loss, loader, optimizer, lr_s, wd_s, mom_s, epoch, args)
        if rank == 0:
            torch.save({"student": student.state_dict(), "teacher": teacher.state_dict(), "epoch": epoch + 1,
                        "optimizer": optimizer.state_dict(), "dino_loss": dino_loss.state_dict()},
                       out / "checkpoint.pth")
            with (out / "log.txt").open("a") as f:
                f.write(json.dumps({**{f"train_{k}": v for k, v in train_stats.items()}, "epoch": epoch}) + "\n")
            print(f"epoch {epoch}: {train_stats}")
    acc = knn_accuracy(teacher.backbone, Textures(512, 1, crops=False), Textures(200, 2, crops=False))
    if rank == 0:
        print(f"10-nn accuracy of the teacher features: {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
