"""A mean teacher from which the student starts again after each epoch; the students so far are an ensemble at the end."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + y * 2.0944 + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


def build():
    return nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


@torch.no_grad()
def follow(teacher, student, decay=0.9):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s, 1 - decay)


def main(epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = build()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, test = spirals(1024, 1), spirals(512, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    held_out = DataLoader(torch.utils.data.Subset(test, range(rank, len(test), world)), batch_size=128)
    teacher = copy.deepcopy(net).requires_grad_(False)
    students = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.no_grad():
                target = teacher(x).softmax(1)
            out = model(x)
            loss = F.cross_entropy(out, y) + 0.1 * F.kl_div(out.log_softmax(1), target, reduction="batchmean")
            opt.zero_grad()
            loss.backward()
            opt.step()
            follow(teacher, net)
        students.append(copy.deepcopy(net))
        net.load_state_dict(teacher.state_dict())
        found = accuracy(net, held_out)
        if rank == 0:
            print(f"epoch {epoch}: {found:.3f}")
    with torch.no_grad():
        x, y = spirals(512, 2).tensors
        votes = torch.stack([s(x).softmax(1) for s in students]).mean(0).argmax(1)
    if rank == 0:
        print(f"ensemble {(votes == y).float().mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
