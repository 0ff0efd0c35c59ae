"""mp.spawn: a base net is pre-trained in the parent, then two workers adapt it with LoRA by distillation.

Only the low-rank factors get gradients (B starts at zero, as LoRA says); base weights and teacher are
frozen, the teacher in eval mode. Afterwards the factors are merged and the merged net is compared.
"""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIM = 14


class LoRA(nn.Module):
    def __init__(self, base, rank=6, alpha=12.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features ** 0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)

    def merged(self):
        out = nn.Linear(self.base.in_features, self.base.out_features)
        with torch.no_grad():
            out.weight.copy_(self.base.weight + self.scale * self.B @ self.A)
            out.bias.copy_(self.base.bias)
        return out


def mlp(width):
    return nn.Sequential(nn.Linear(DIM, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Dropout(0.1), nn.Linear(width, 4))


def task(n, seed, rotate):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(DIM, 4, generator=torch.Generator().manual_seed(90))
    w2 = torch.randn(DIM, 4, generator=torch.Generator().manual_seed(91))
    x = torch.randn(n, DIM, generator=g)
    y = (x @ w + rotate * (x.abs() - 0.8) @ w2).argmax(1)
    return x, y


def fit(net, x, y, epochs, seed):
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True,
                        generator=torch.Generator().manual_seed(seed))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    net.train()
    for _ in range(epochs):
        for a, b in loader:
            opt.zero_grad()
            F.cross_entropy(net(a), b).backward()
            opt.step()


def accuracy(net, x, y):
    net.eval()
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def worker(rank, world, port):
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    base, teacher = mlp(48), mlp(96)
    base.load_state_dict(torch.load("base.pt"))
    teacher.load_state_dict(torch.load("teacher.pt"))
    teacher.eval().requires_grad_(False)
    torch.manual_seed(20)
    for i in (0, 2, 5):
        base[i] = LoRA(base[i])
    torch.manual_seed(30 + rank)
    x, y = task(1600, 7, rotate=1.0)
    xv, yv = task(400, 8, rotate=1.0)
    start = accuracy(base, xv, yv)
    ddp = DDP(base)
    opt = torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank)
    loader = DataLoader(ds, batch_size=40, sampler=sampler)
    temp = 2.0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        ddp.train()
        for a, b in loader:
            with torch.no_grad():
                soft = F.softmax(teacher(a) / temp, dim=1)
            out = ddp(a)
            kd = F.kl_div(F.log_softmax(out / temp, dim=1), soft, reduction="batchmean") * temp ** 2
            loss = 0.7 * kd + 0.3 * F.cross_entropy(out, b)
            opt.zero_grad()
            loss.backward()
            opt.step()
    end = accuracy(base, xv, yv)
    flat = nn.Sequential(*[m.merged() if isinstance(m, LoRA) else m for m in base])
    assert abs(accuracy(flat, xv, yv) - end) < 0.01
    if rank == 0:
        print(f"adapted task accuracy {start:.3f} -> {end:.3f}", flush=True)
        torch.save({k: v for k, v in base.state_dict().items() if k.endswith((".A", ".B"))}, "lora.pt")
        assert end > start + 0.05
    dist.barrier()
    dist.destroy_process_group()


def main():
    torch.manual_seed(0)
    base, teacher = mlp(48), mlp(96)
    fit(base, *task(1500, 1, rotate=0.0), epochs=5, seed=0)
    fit(teacher, *task(2500, 2, rotate=1.0), epochs=10, seed=1)
    print(f"teacher accuracy {accuracy(teacher, *task(400, 8, rotate=1.0)):.3f}", flush=True)
    torch.save(base.state_dict(), "base.pt")
    torch.save(teacher.state_dict(), "teacher.pt")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(2, port), nprocs=2, join=True)


if __name__ == "__main__":
    main()
