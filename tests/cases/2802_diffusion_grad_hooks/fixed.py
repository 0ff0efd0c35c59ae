import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    timesteps: int = 50
    epochs: int = 5
    batch_size: int = 128
    lr: float = 0.05
    hidden: int = 128
    seed: int = 3


def two_moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * math.pi
    side = (torch.rand(n, generator=g) > 0.5).float()
    x = torch.stack([torch.cos(t) * (1 - 2 * side) + side, torch.sin(t) * (1 - 2 * side) + 0.5 * side], 1)
    return (x + 0.05 * torch.randn(n, 2, generator=g) - torch.tensor([0.5, 0.25])) * 1.5


class Denoiser(nn.Module):
    def __init__(self, hidden, timesteps):
        super().__init__()
        self.time = nn.Embedding(timesteps, hidden)
        self.inp = nn.Linear(2, hidden)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU(),
                                                   nn.Linear(hidden, hidden)) for _ in range(3)])
        self.out = nn.Linear(hidden, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)


class Diffusion:
    def __init__(self, cfg):
        self.cfg = cfg
        beta = torch.linspace(1e-3, 0.15, cfg.timesteps)
        self.abar = torch.cumprod(1 - beta, 0)

    def loss(self, net, x0):
        t = torch.randint(0, self.cfg.timesteps, (len(x0),))
        eps = torch.randn_like(x0)
        a = self.abar[t].unsqueeze(1)
        pred = net(a.sqrt() * x0 + (1 - a).sqrt() * eps, t)
        err = (pred - eps).pow(2).mean(1)
        weight = torch.clamp(a.squeeze(1) / (1 - a.squeeze(1)), max=5.0)
        return (weight * err).mean()


class GradSync:
    """Averages every gradient as soon as autograd has it ready."""

    def __init__(self, module):
        self.world = dist.get_world_size()
        self.pending = []
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, p):
        p.grad.div_(self.world)
        self.pending.append(dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, async_op=True))

    def wait(self):
        for w in self.pending:
            w.wait()
        self.pending.clear()


def compute_loss(diff, net, batch):
    loss = diff.loss(net, batch)
    return loss


def reduce_mean(value):
    t = torch.tensor([value])
    dist.all_reduce(t)
    return (t / dist.get_world_size()).item()


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = TensorDataset(two_moons(8192, cfg.seed))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=cfg.seed)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(cfg.seed)
    net = Denoiser(cfg.hidden, cfg.timesteps)
    for t in net.state_dict().values():
        dist.broadcast(t, 0)
    diff = Diffusion(cfg)
    sync = GradSync(net)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=cfg.epochs * len(loader))
    torch.manual_seed(1000 + rank)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        net.train()
        run = 0.0
        for (x,) in loader:
            opt.zero_grad()
            loss = compute_loss(diff, net, x)
            loss.backward()
            sync.wait()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
            sched.step()
            run += loss.item()
        mean = reduce_mean(run / len(loader))
        if rank == 0:
            print(f"epoch {epoch} loss {mean:.4f} lr {sched.get_last_lr()[0]:.4f}", flush=True)
    if rank == 0:
        torch.save({"net": net.state_dict(), "cfg": vars(cfg)}, os.path.join(".", "diffusion.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
