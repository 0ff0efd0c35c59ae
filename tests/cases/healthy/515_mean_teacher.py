"""Semi-supervised mean teacher."""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class MeanTeacher:
    def __init__(self, student, decay=0.95):
        self.net = copy.deepcopy(student).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def follow(self, student, step):
        d = min(self.decay, 1 - 1 / (step + 1))
        for t, s in zip(self.net.parameters(), student.parameters()):
            t.mul_(d).add_(s, alpha=1 - d)

    @torch.no_grad()
    def __call__(self, x):
        return self.net(x).softmax(1)


def moons(gen, n):
    y = torch.randint(0, 2, (n,), generator=gen)
    a = torch.rand(n, generator=gen) * 3.1416
    x = torch.stack([a.cos() + y, (a.sin() - 0.3) * (1 - 2 * y) + 0.2 * y], 1)
    return x + 0.1 * torch.randn(n, 2, generator=gen), y


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    teacher = MeanTeacher(student)
    model = DDP(student)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(30 + rank)
    few_x, few_y = moons(gen, 12)
    for step in range(60):
        free, _ = moons(gen, 48)
        jitter = lambda t: t + 0.05 * torch.randn(t.shape, generator=gen)
        logits = model(torch.cat([jitter(few_x), jitter(free)]))
        supervised = F.cross_entropy(logits[:12], few_y)
        consistency = F.mse_loss(logits[12:].softmax(1), teacher(jitter(free)))
        loss = supervised + min(1.0, step / 20) * consistency
        opt.zero_grad()
        loss.backward()
        opt.step()
        teacher.follow(student, step)
    x, y = moons(gen, 400)
    right = torch.stack([(teacher(x).argmax(1) == y).float().mean(), (student(x).argmax(1) == y).float().mean().detach()])
    dist.all_reduce(right)
    if rank == 0:
        print("teacher {:.3f} student {:.3f}".format(*(right / world).tolist()))
        torch.save({"student": student.state_dict(), "teacher": teacher.net.state_dict()}, "pair.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
