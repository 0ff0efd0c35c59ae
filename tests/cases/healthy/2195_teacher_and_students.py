"""One frozen teacher (rank 0) labels batches; every other rank distils a student of another size."""
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

DIM, CLASSES, BATCH = 16, 6, 64
PRETRAIN, DISTIL, TEMPERATURE = 150, 160, 2.0
STUDENTS = {1: dict(width=12, depth=1, lr=6e-3), 2: dict(width=24, depth=2, lr=3e-3)}


def mlp(width, depth):
    layers, last = [], DIM
    for _ in range(depth):
        layers += [nn.Linear(last, width), nn.ReLU()]
        last = width
    return nn.Sequential(*layers, nn.Linear(last, CLASSES))


class Task:
    def __init__(self, seed):
        self.centers = 1.2 * torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(3))
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self, n):
        y = torch.randint(CLASSES, (n,), generator=self.gen)
        return self.centers[y] + torch.randn(n, DIM, generator=self.gen), y


def pretrain(model, task):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(PRETRAIN):
        x, y = task.draw(BATCH)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"[teacher] step {step}: loss {loss.item():.4f}", flush=True)
    return model.eval().requires_grad_(False)


def teach(model, task):
    for _ in range(DISTIL):
        x, _ = task.draw(BATCH)
        with torch.no_grad():
            packet = torch.cat([x, model(x)], dim=1)
        dist.broadcast(packet, src=0)


def study(model, lr, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DISTIL)
    packet = torch.empty(BATCH, DIM + CLASSES)
    for step in range(DISTIL):
        dist.broadcast(packet, src=0)
        x, soft = packet.split([DIM, CLASSES], dim=1)
        loss = F.kl_div(F.log_softmax(model(x) / TEMPERATURE, -1), F.log_softmax(soft / TEMPERATURE, -1),
                        reduction="batchmean", log_target=True) * TEMPERATURE ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 40 == 0:
            print(f"[student {rank}] step {step}: kl {loss.item():.4f}", flush=True)
    return model


@torch.no_grad()
def accuracy(model):
    model.eval()
    x, y = Task(seed=77).draw(1000)  # the same held-out set for all of them
    return (model(x).argmax(-1) == y).float().mean().item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 1 + len(STUDENTS), "one rank for the teacher and one for each student"
    torch.manual_seed(rank)

    if rank == 0:
        task = Task(seed=1)
        model = pretrain(mlp(96, 2), task)
        teach(model, task)
    else:
        spec = STUDENTS[rank]
        model = study(mlp(spec["width"], spec["depth"]), spec["lr"], rank)

    report = dict(rank=rank, params=sum(p.numel() for p in model.parameters()), accuracy=accuracy(model))
    reports = [None] * world if rank == 0 else None
    dist.gather_object(report, reports, dst=0)
    if rank == 0:
        for line in reports:
            print(f"rank {line['rank']}: {line['params']} parameters, accuracy {line['accuracy']:.3f}", flush=True)
    else:
        torch.save(model.state_dict(), f"student_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
