"""Self-distillation (DINO style): momentum teacher, centre over all ranks, cosine schedules for lr, weight decay and momentum."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Views(Dataset):
    """Two random views of a picture; what the view is depends on the worker's random numbers."""

    def __init__(self, n=192):
        g = torch.Generator().manual_seed(8)
        proto = torch.randn(6, 3, 8, 8, generator=g)
        which = torch.randint(0, 6, (n,), generator=g)
        self.base = proto[which] + 0.3 * torch.randn(n, 3, 8, 8, generator=g)

    def __len__(self):
        return len(self.base)

    def view(self, x):
        dx, dy = torch.randint(-2, 3, (2,)).tolist()
        x = torch.roll(x, (dx, dy), (1, 2))
        if torch.rand(()) < 0.5:
            x = x.flip(2)
        return x * (0.8 + 0.4 * torch.rand(()))

    def __getitem__(self, i):
        return self.view(self.base[i]), self.view(self.base[i])


class Net(nn.Module):
    def __init__(self, out=24):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(16, out, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1.0)
        self.last.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last(F.normalize(self.head(self.body(x)), dim=1))


class DinoLoss(nn.Module):
    def __init__(self, out=24, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student, teacher):
        s1, s2 = (student / 0.1).chunk(2)
        t1, t2 = F.softmax((teacher - self.center) / 0.05, dim=1).detach().chunk(2)
        loss = -(t1 * F.log_softmax(s2, 1)).sum(1).mean() - (t2 * F.log_softmax(s1, 1)).sum(1).mean()
        self.update(teacher)
        return loss / 2

    @torch.no_grad()
    def update(self, teacher):
        total = teacher.sum(0, keepdim=True)
        dist.all_reduce(total)
        total /= len(teacher) * dist.get_world_size()
        self.center.mul_(self.momentum).add_(total, alpha=1 - self.momentum)


def cosine(start, end, steps):
    return [end + 0.5 * (start - end) * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)  # DDP broadcasts rank 0's weights; the augmentations have to differ
    student = Net()
    student = DDP(student)
    teacher = copy.deepcopy(student.module)
    for p in teacher.parameters():
        p.requires_grad = False
    data = Views()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=24, sampler=sampler, num_workers=1, drop_last=True)
    decay = [p for p in student.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in student.parameters() if p.requires_grad and p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.0)
    criterion = DinoLoss()
    epochs, steps = 4, 4 * len(loader)
    warm = 3
    lrs = [2e-3 * (i + 1) / warm for i in range(warm)] + cosine(2e-3, 1e-5, steps - warm)
    wds, moms = cosine(0.04, 0.4, steps), cosine(0.98, 1.0, steps)
    it = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for a, b in loader:
            for i, group in enumerate(opt.param_groups):
                group["lr"] = lrs[it]
                if i == 0:
                    group["weight_decay"] = wds[it]
            views = torch.cat([a, b])
            with torch.no_grad():
                t_out = teacher(views)
            loss = criterion(student(views), t_out)
            opt.zero_grad()
            loss.backward()
            if epoch < 1:  # the last layer rests for the first epoch, as in the paper
                for name, p in student.module.named_parameters():
                    if name.startswith("last"):
                        p.grad = None
            opt.step()
            with torch.no_grad():
                m = moms[it]
                for ps, pt in zip(student.module.parameters(), teacher.parameters()):
                    pt.mul_(m).add_(ps.detach(), alpha=1 - m)
            it += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f} lr {lrs[it - 1]:.5f} centre norm {criterion.center.norm():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
