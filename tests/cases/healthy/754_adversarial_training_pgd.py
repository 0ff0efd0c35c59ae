# PGD adversarial training + robust evaluation (needs gradients w.r.t. the input in eval mode, so no no_grad there)
import os, sys
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset, DataLoader
from torch.utils.data.distributed import DistributedSampler

CFG = dict(eps=0.15, alpha=0.06, steps=3, epochs=3, bs=32, lr=0.05)


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(4, 20, generator=torch.Generator().manual_seed(42))
    y = torch.randint(4, (n,), generator=g)
    return TensorDataset(centers[y] + 0.7 * torch.randn(n, 20, generator=g), y)


def pgd(net, x, y):
    was_training = net.training
    net.eval()
    delta = torch.zeros_like(x).uniform_(-CFG["eps"], CFG["eps"])
    for _ in range(CFG["steps"]):
        delta.requires_grad_(True)
        l = F.cross_entropy(net(x + delta), y)
        g, = torch.autograd.grad(l, delta)
        delta = (delta.detach() + CFG["alpha"] * g.sign()).clamp(-CFG["eps"], CFG["eps"])
    net.train(was_training)
    return (x + delta).detach()


def robust_eval(net, loader):
    net.eval()
    c = torch.zeros(3)
    for x, y in loader:
        adv = pgd(net, x, y)
        with torch.no_grad():
            c[0] += (net(x).argmax(1) == y).sum()
            c[1] += (net(adv).argmax(1) == y).sum()
            c[2] += len(y)
    dist.all_reduce(c)
    return (c[0] / c[2]).item(), (c[1] / c[2]).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    ddp = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)))
    core = ddp.module                                     # attacks go through the bare module: no gradient of a parameter is needed
    opt = torch.optim.SGD(ddp.parameters(), CFG["lr"], momentum=0.9, nesterov=True)
    tr, te = make(512, 0), make(128, 1)
    smp = DistributedSampler(tr)
    trl = DataLoader(tr, CFG["bs"], sampler=smp)
    tel = DataLoader(te, CFG["bs"], sampler=DistributedSampler(te, shuffle=False))
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, CFG["epochs"] * len(trl))
    for ep in range(CFG["epochs"]):
        smp.set_epoch(ep)
        ddp.train()
        for x, y in trl:
            adv = pgd(core, x, y)
            opt.zero_grad()
            F.cross_entropy(ddp(adv), y).backward()
            opt.step()
            sched.step()
        clean, rob = robust_eval(core, tel)
        if rank == 0:
            print(f"[{ep}] clean {clean:.3f} robust {rob:.3f}")
    dist.destroy_process_group()
