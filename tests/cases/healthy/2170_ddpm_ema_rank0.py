"""Class-conditional DDPM on 8x8 patterns. The averaged weights live on rank 0 only; the others get them for the final sampling."""
import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    steps: int = 150
    batch: int = 32
    lr: float = 2e-3
    T: int = 50
    classes: int = 4
    drop_label: float = 0.15
    ema_decay: float = 0.97
    guidance: float = 1.0
    samples: int = 64
    folder: str = "ddpm"


def templates(cfg):
    return torch.randn(cfg.classes, 64, generator=torch.Generator().manual_seed(77)).sign()


class Denoiser(nn.Module):
    def __init__(self, cfg, width=128):
        super().__init__()
        self.time, self.label = nn.Embedding(cfg.T, 32), nn.Embedding(cfg.classes + 1, 32)
        self.inp, self.mid, self.out = nn.Linear(64 + 64, width), nn.Linear(width + 64, width), nn.Linear(width, 64)

    def forward(self, x, t, y):
        c = torch.cat([self.time(t), self.label(y)], 1)
        h = F.silu(self.inp(torch.cat([x, c], 1)))
        h = h + F.silu(self.mid(torch.cat([h, c], 1)))
        return self.out(h)


class Diffusion:
    def __init__(self, cfg):
        self.cfg = cfg
        self.beta = torch.linspace(1e-3, 0.15, cfg.T)
        self.alpha, self.bar = 1 - self.beta, (1 - self.beta).cumprod(0)

    def loss(self, net, x0, y, g):
        half = torch.randint(self.cfg.T, (len(x0) // 2,), generator=g)
        t = torch.cat([half, self.cfg.T - 1 - half])                                   # antithetic pairs
        noise = torch.randn(x0.shape, generator=g)
        y = torch.where(torch.rand(len(y), generator=g) < self.cfg.drop_label, self.cfg.classes, y)
        a = self.bar[t][:, None]
        return F.mse_loss(net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t, y), noise)

    @torch.no_grad()
    def sample(self, net, y, g):
        net.eval()
        x, null = torch.randn(len(y), 64, generator=g), torch.full_like(y, self.cfg.classes)
        for i in reversed(range(self.cfg.T)):
            t = torch.full_like(y, i)
            cond, free = net(x, t, y), net(x, t, null)
            eps = cond + self.cfg.guidance * (cond - free)
            x = (x - self.beta[i] / (1 - self.bar[i]).sqrt() * eps) / self.alpha[i].sqrt()
            if i:
                x = x + self.beta[i].sqrt() * torch.randn(x.shape, generator=g)
        return x


def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def closeness(cfg, x, y):
    return F.cosine_similarity(x, templates(cfg)[y]).sum()


def main(cfg=Config()):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    main_process = rank == 0
    own = torch.Generator().manual_seed(1000 + rank)              # noise differs by rank on purpose
    torch.manual_seed(0)

    g = torch.Generator().manual_seed(5)
    y = torch.randint(cfg.classes, (1024,), generator=g)
    data = TensorDataset(templates(cfg)[y] + 0.2 * torch.randn(1024, 64, generator=g), y)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    batches = cycle(DataLoader(data, cfg.batch, sampler=sampler, drop_last=True), sampler)

    net = Denoiser(cfg)
    ema = copy.deepcopy(net).requires_grad_(False) if main_process else None
    ddp = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, fp16_compress_hook)
    opt = torch.optim.AdamW(ddp.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 20))
    diffusion, running = Diffusion(cfg), []
    if main_process:
        Path(cfg.folder).mkdir(exist_ok=True)

    for step in range(1, cfg.steps + 1):
        loss = diffusion.loss(ddp, *next(batches), own)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        running.append(loss.item())
        if main_process:
            with torch.no_grad():
                decay = min(cfg.ema_decay, (1 + step) / (10 + step))
                for e, p in zip(ema.parameters(), net.parameters()):
                    e.lerp_(p, 1 - decay)
        if step % 50 == 0:
            mean = torch.tensor(running).mean()
            dist.reduce(mean, dst=0)
            running.clear()
            if main_process:                                     # the others wait in the next backward
                labels = torch.arange(16) % cfg.classes
                x = diffusion.sample(ema, labels, torch.Generator().manual_seed(step))
                print(f"step {step} loss {mean.item() / world:.4f} cosine {closeness(cfg, x, labels).item() / 16:.3f}", flush=True)
                torch.save({"net": net.state_dict(), "ema": ema.state_dict(), "step": step}, f"{cfg.folder}/model-{step}.pt")

    sampling_net = ema if main_process else copy.deepcopy(net).requires_grad_(False)
    for tensor in sampling_net.state_dict().values():
        dist.broadcast(tensor, src=0)
    labels = torch.arange(rank, cfg.samples, world) % cfg.classes
    x = diffusion.sample(sampling_net, labels, torch.Generator().manual_seed(31 + rank))
    score = torch.stack([closeness(cfg, x, labels), torch.tensor(float(len(labels)))])
    dist.all_reduce(score)
    torch.save(x, Path(cfg.folder) / f"samples_rank{rank}.pt")
    if main_process:
        print(f"final cosine {(score[0] / score[1]).item():.3f} over {int(score[1])} samples")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
