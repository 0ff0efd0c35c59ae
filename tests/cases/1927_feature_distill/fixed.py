"""Feature distillation: a small student imitates logits and an inner feature map of a fixed teacher."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layers, last = [], 1
        for _ in range(depth):
            layers += [nn.Conv2d(last, width, 3, padding=1), nn.ReLU()]
            last = width
        self.stem = nn.Sequential(*layers)
        self.reduce = nn.Conv2d(width, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        z = self.reduce(self.stem(x))
        return self.head(z.mean((2, 3)))


class Tap:
    """Collects what a layer puts out."""

    def __init__(self, layer):
        self.outputs = []
        layer.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.outputs = [output]

    def last(self):
        return self.outputs[-1]


class Distiller:
    def __init__(self, teacher, student, lr, feature_weight, temperature=2.0):
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = DDP(student)
        self.teacher_tap = Tap(teacher.reduce)
        self.student_tap = Tap(student.reduce)
        self.opt = torch.optim.Adam(self.student.parameters(), lr=lr)
        self.feature_weight = feature_weight
        self.temperature = temperature

    def step(self, images):
        with torch.no_grad():
            target = self.teacher(images)
        logits = self.student(images)
        t = self.temperature
        soft = F.kl_div((logits / t).log_softmax(1), (target / t).softmax(1), reduction="batchmean") * t * t
        feature = F.mse_loss(self.student_tap.last(), self.teacher_tap.last())
        loss = soft + self.feature_weight * feature
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


def images(steps, batch, size, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        coarse = torch.randn(batch, 1, size // 4, size // 4, generator=g)
        yield F.interpolate(coarse, scale_factor=4, mode="bilinear", align_corners=False)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--size", type=int, default=28)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    teacher, student = Net(12, 2), Net(6, 1)
    distiller = Distiller(teacher, student, lr=1e-2, feature_weight=5.0)
    window = 0.0
    for i, x in enumerate(images(args.steps, args.batch, args.size, seed=500 + rank), start=1):
        window += distiller.step(x)
        if i % 15 == 0:
            mean = torch.tensor(window / 15)
            dist.all_reduce(mean)
            window = 0.0
            if rank == 0:
                print(f"{i:4d}  distillation loss {mean.item() / world:.5f}", flush=True)
    if rank == 0:
        torch.save(student.state_dict(), "student.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
