"""Knowledge distillation: a wide teacher, trained beforehand, guides a narrow student."""
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TEACHER_FILE = Path("teacher.pt")


def glyphs(n, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = (torch.rand(10, 1, 10, 10, generator=torch.Generator().manual_seed(77)) > 0.6).float()
    y = torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(shapes[y] + 0.7 * torch.randn(n, 1, 10, 10, generator=g), y)


def convnet(width, dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * width, 10),
    )  # fmt: skip


class Distiller(nn.Module):
    """Holds both networks, so that one call gives the whole loss."""

    def __init__(self, teacher, student, temperature=3.0, alpha=0.7):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.temperature, self.alpha = temperature, alpha
        self.teacher.requires_grad_(False)

    def forward(self, x, y):
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / self.temperature, dim=1)
        logits = self.student(x)
        kd = F.kl_div(F.log_softmax(logits / self.temperature, dim=1), soft, reduction="batchmean")
        return self.alpha * self.temperature**2 * kd + (1 - self.alpha) * F.cross_entropy(logits, y)


def prepare_teacher(data):
    """Done once, by one process."""
    torch.manual_seed(1)
    net = convnet(24, dropout=0.4)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
    torch.save(net.state_dict(), TEACHER_FILE)


@torch.no_grad()
def accuracy(net, data, rank, world):
    x, y = data.tensors
    x, y = x[rank::world], y[rank::world]
    hits = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main(epochs=5, batch_size=20, lr=2e-3):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train_set, test_set = glyphs(640, 3), glyphs(200, 4)
    if rank == 0:
        prepare_teacher(train_set)
    dist.barrier()

    torch.manual_seed(8)
    teacher = convnet(24, dropout=0.4)
    teacher.load_state_dict(torch.load(TEACHER_FILE))
    teacher.eval()
    model = DDP(Distiller(teacher, convnet(6)))
    optimizer = torch.optim.Adam(model.module.student.parameters(), lr=lr)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        model.module.teacher.eval()
        running = torch.zeros(1)
        for x, y in loader:
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        model.eval()
        acc = accuracy(model.module.student, test_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / (world * len(loader)):.4f} student {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.student.state_dict(), "student.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
