"""Knowledge distillation: the teacher is trained first, then frozen and used without DDP on every rank."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Checker(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = 4 * torch.rand(n, 2, generator=g)
        self.y = (self.x.floor().sum(1) % 2).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def fourier(x):
    return torch.cat([torch.sin(3.1416 * x), torch.cos(3.1416 * x)], 1)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(fourier(x))))


def kd_loss(student, teacher, y, T=2.0, alpha=0.7):
    soft = F.kl_div(F.log_softmax(student / T, 1), F.softmax(teacher / T, 1), reduction="batchmean") * T * T
    return alpha * soft + (1 - alpha) * F.cross_entropy(student, y)


def fit(model, data, epochs, loss_fn, lr, first_epoch=0):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    sampler = DistributedSampler(data, seed=8)
    loader = DataLoader(data, 32, sampler=sampler)
    for epoch in range(first_epoch, first_epoch + epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_fn(model(x), x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()


@torch.no_grad()
def accuracy(net, data, rank, world):
    hits = (net(data.x[rank::world]).argmax(1) == data.y[rank::world]).sum()
    dist.all_reduce(hits)
    return hits.item() / len(data)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    train, test = Checker(512, 1), Checker(201, 2)
    teacher_ddp = DDP(Net(128))
    fit(teacher_ddp, train, 3, lambda out, x, y: F.cross_entropy(out, y), 2e-2)
    teacher = teacher_ddp.module.eval().requires_grad_(False)
    del teacher_ddp

    student = Net(12)

    def with_teacher(out, x, y):
        with torch.no_grad():
            t = teacher(x)
        return kd_loss(out, t, y)

    fit(DDP(student), train, 3, with_teacher, 2e-2, first_epoch=3)
    a_t, a_s = accuracy(teacher, test, rank, world), accuracy(student, test, rank, world)
    if rank == 0:
        print(f"teacher {a_t:.3f} student {a_s:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
