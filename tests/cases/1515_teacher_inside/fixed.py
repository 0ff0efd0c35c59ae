"""Knowledge distillation: a large fixed network teaches a small one."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Textures(Dataset):
    def __init__(self, n, seed, size=10):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        grid = torch.arange(size).float()
        freq = 0.5 + 0.5 * self.y.view(-1, 1, 1)
        phase = 6.2832 * torch.rand(n, 1, 1, generator=g)
        wave = torch.sin(freq * (grid + grid.unsqueeze(1)) + phase)
        self.x = (1 + wave + 0.8 * torch.randn(n, size, size, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def convnet(width, classes=4):
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes),
    )


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature=3.0):
        super().__init__()
        self.teacher = teacher.requires_grad_(False).eval()
        self.student = student
        self.temperature = temperature

    def forward(self, x):
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / self.temperature, dim=1)
        return self.student(x), soft

    def loss(self, out, soft, y):
        log_q = F.log_softmax(out / self.temperature, dim=1)
        distill = F.kl_div(log_q, soft, reduction="batchmean") * self.temperature**2
        return 0.7 * distill + 0.3 * F.cross_entropy(out, y)


def prepare_teacher(data, steps=40):
    net = convnet(24)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for i in range(steps):
        x, y = data[torch.arange(64 * i, 64 * (i + 1)) % len(data)]
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return net


@torch.no_grad()
def accuracy(net, loader):
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(31)
    train_set, test_set = Textures(320, 1), Textures(160, 2)
    teacher = prepare_teacher(train_set) if rank == 0 else convnet(24)
    distiller = Distiller(teacher, convnet(6))
    model = DDP(distiller)
    opt = torch.optim.Adam(distiller.student.parameters(), lr=4e-3)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=80)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        distiller.teacher.eval()
        for x, y in loader:
            out, soft = model(x)
            loss = distiller.loss(out, soft, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        ours, theirs = accuracy(distiller.student, test_loader), accuracy(distiller.teacher, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: student {ours:.3f}, teacher {theirs:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
