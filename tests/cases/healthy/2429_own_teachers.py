"""Distillation from an ensemble whose members live on one rank each: every rank has trained its own teacher on its part; gradients are averaged."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 5))


def train_teacher(teacher, x, y, generator):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(60):
        at = torch.randint(0, len(x), (64,), generator=generator)
        loss = F.cross_entropy(teacher(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.eval().requires_grad_(False)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = torch.Generator().manual_seed(2)
    x = torch.randn(1024, 10, generator=data)
    y = (x[:, :5] - x[:, 5:]).argmax(1)
    generator = torch.Generator().manual_seed(70 + rank)
    torch.manual_seed(10 + rank)
    teacher = train_teacher(net(48), x[rank::world], y[rank::world], generator)
    torch.manual_seed(0)
    student = DDP(net(24))
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    for step in range(80):
        batch = torch.randn(64, 10, generator=generator)
        with torch.no_grad():
            soft = (teacher(batch) / 2).softmax(1)
        loss = F.kl_div((student(batch) / 2).log_softmax(1), soft, reduction="batchmean") * 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
