"""A teacher is trained, then a student is distilled in two phases: LoRA adapters only, then everything."""
import dataclasses
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclasses.dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    lr: float
    trainable: str       # a part of the parameter names; "" is all


def batch(gen, n=48):
    x = torch.randint(0, 16, (n, 10), generator=gen)
    y = (x[:, :5].sum(1) - x[:, 5:].sum(1)).div(8, rounding_mode="floor") % 6
    return x, y


class Net(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.emb = nn.Embedding(16, dim)
        self.place = nn.Parameter(torch.randn(10, dim) * 0.1)
        self.body = nn.ModuleList([nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.05), nn.Linear(2 * dim, dim)) for _ in range(depth)])
        self.mix = nn.Linear(10 * dim, dim)
        self.head = nn.Linear(dim, 6)

    def forward(self, x):
        h = self.mix((self.emb(x) * (1 + self.place)).flatten(1))
        for b in self.body:
            h = h + b(h)
        return self.head(h)


class LoRA(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale

    @torch.no_grad()
    def merged(self):
        self.base.weight += self.scale * self.lora_b @ self.lora_a
        return self.base


def swap(module, test, make):
    for name, child in module.named_children():
        if test(child):
            setattr(module, name, make(child))
        else:
            swap(child, test, make)


@torch.no_grad()
def evaluate(net, rank, world):
    was = net.training
    net.eval()
    x, y = batch(torch.Generator().manual_seed(5), 501)
    hit = (net(x[rank::world]).argmax(1) == y[rank::world]).float()
    acc = torch.stack([hit.sum(), torch.tensor(float(hit.numel()))])
    dist.all_reduce(acc)
    net.train(was)
    return (acc[0] / acc[1]).item()


def fit(net, phase, gen, teacher=None, temperature=2.0):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, p in net.named_parameters():
        p.requires_grad_(phase.trainable in name)
        p.grad = None
    ddp = DDP(net)                # the set of trained weights changed: wrap anew
    params = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=phase.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, phase.steps)
    for step in range(phase.steps):
        x, y = batch(gen)
        out = ddp(x)
        loss = F.cross_entropy(out, y)
        if teacher is not None:
            with torch.no_grad():
                soft = (teacher(x) / temperature).softmax(-1)
            kd = F.kl_div((out / temperature).log_softmax(-1), soft, reduction="batchmean") * temperature ** 2
            loss = 0.3 * loss + 0.7 * kd
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    acc = evaluate(net, rank, world)
    if rank == 0:
        print(f"{phase.name}: loss {mean.item() / world:.3f} acc {acc:.3f} trained {sum(p.numel() for p in params)}", flush=True)
    return acc


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    teacher, student = Net(64, 2), Net(32, 1)
    gen = torch.Generator().manual_seed(300 + rank)
    torch.manual_seed(30 + rank)
    fit(teacher, Phase("teacher", 300, 3e-3, ""), gen)
    teacher.requires_grad_(False)
    teacher.eval()
    fit(student, Phase("student, warm", 100, 3e-3, ""), gen)
    torch.manual_seed(33)
    swap(student, lambda m: isinstance(m, nn.Linear), LoRA)
    torch.manual_seed(60 + rank)
    fit(student, Phase("adapters", 120, 5e-3, "lora_"), gen, teacher)
    before = evaluate(student, rank, world)
    swap(student, lambda m: isinstance(m, LoRA), LoRA.merged)
    after = evaluate(student, rank, world)
    assert abs(before - after) < 0.01, (before, after)
    fit(student, Phase("all", 150, 2e-3, ""), gen, teacher)
    if rank == 0:
        torch.save({"student": student.state_dict(), "teacher": teacher.state_dict()}, "distilled.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
