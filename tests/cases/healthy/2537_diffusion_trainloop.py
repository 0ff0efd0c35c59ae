"""Denoising diffusion with importance-sampled time steps and several exponential averages."""
import copy
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

STEPS = 60


def shard_range(n, rank, world):
    return list(range(n))[rank::world]


class Rings(Dataset):
    def __init__(self, n=2000, shard=0, num_shards=1):
        g = torch.Generator().manual_seed(0)
        r = torch.randint(1, 3, (n, 1), generator=g).float() * 0.8
        a = torch.rand(n, 1, generator=g) * 2 * math.pi
        self.x = torch.cat([r * a.cos(), r * a.sin()], 1) + 0.03 * torch.randn(n, 2, generator=g)
        self.local = shard_range(n, shard, num_shards)

    def __len__(self):
        return len(self.local)

    def __getitem__(self, i):
        return self.x[self.local[i]]


def load_data(bs, rank, world):
    loader = DataLoader(Rings(shard=rank, num_shards=world), batch_size=bs, shuffle=True, drop_last=True)
    while True:
        yield from loader


class Eps(nn.Module):
    def __init__(self, h=96):
        super().__init__()
        self.t = nn.Embedding(STEPS, h)
        self.inp = nn.Linear(2, h)
        self.net = nn.Sequential(nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2))

    def forward(self, x, t):
        return self.net(self.inp(x) + self.t(t))


class Diffusion:
    def __init__(self):
        beta = torch.linspace(1e-3, 0.12, STEPS)
        self.ab = (1 - beta).cumprod(0)

    def training_losses(self, model, x0, t):
        noise = torch.randn_like(x0)
        a = self.ab[t].unsqueeze(1)
        return (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).pow(2).mean(1)


class LossSecondMomentResampler:
    def __init__(self, history=5, uniform=0.01):
        self.h, self.uniform = history, uniform
        self.hist = np.zeros((STEPS, history))
        self.counts = np.zeros(STEPS, dtype=int)

    def weights(self):
        if not (self.counts == self.h).all():
            return np.ones(STEPS)
        w = np.sqrt(np.mean(self.hist ** 2, axis=-1))
        w /= w.sum()
        return w * (1 - self.uniform) + self.uniform / STEPS

    def sample(self, n):
        p = self.weights()
        p = p / p.sum()
        idx = np.random.choice(STEPS, size=(n,), p=p)
        return torch.from_numpy(idx).long(), torch.from_numpy(1 / (STEPS * p[idx])).float()

    def update_with_local_losses(self, ts, losses):
        sizes = [torch.zeros(1, dtype=torch.int32) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(ts)], dtype=torch.int32))
        sizes = [s.item() for s in sizes]
        m = max(sizes)
        bt = [torch.zeros(m, dtype=ts.dtype) for _ in sizes]
        bl = [torch.zeros(m) for _ in sizes]
        dist.all_gather(bt, ts)
        dist.all_gather(bl, losses)
        for y, x, n in zip(bt, bl, sizes):
            for t, l in zip(y[:n].tolist(), x[:n].tolist()):
                if self.counts[t] == self.h:
                    self.hist[t, :-1] = self.hist[t, 1:]
                    self.hist[t, -1] = l
                else:
                    self.hist[t, self.counts[t]] = l
                    self.counts[t] += 1


class TrainLoop:
    def __init__(self, model, diffusion, data, batch_size, microbatch, lr, ema_rate, log_interval, save_interval, total):
        self.model, self.diffusion, self.data = model, diffusion, data
        self.batch_size, self.microbatch, self.lr = batch_size, microbatch, lr
        self.ema_rate = [float(x) for x in ema_rate.split(",")]
        self.log_interval, self.save_interval, self.total = log_interval, save_interval, total
        self.sampler = LossSecondMomentResampler()
        self.step = 0
        for p in model.parameters():
            with torch.no_grad():
                dist.broadcast(p, 0)
        self.params = list(model.parameters())
        self.opt = AdamW(self.params, lr=lr, weight_decay=0.0)
        self.ema_params = [copy.deepcopy(self.params) for _ in self.ema_rate]
        self.ddp = DDP(model, broadcast_buffers=False, find_unused_parameters=False)
        self.stats = torch.zeros(2)

    def run_loop(self):
        while self.step < self.total:
            self.run_step(next(self.data))
            if self.step % self.log_interval == 0:
                s = self.stats.clone()
                dist.all_reduce(s)
                self.stats.zero_()
                if dist.get_rank() == 0:
                    print(f"| step {self.step} | loss {(s[0] / s[1]).item():.4f} |", flush=True)
            if self.step and self.step % self.save_interval == 0:
                self.save()
            self.step += 1
        if (self.step - 1) % self.save_interval != 0:
            self.save()

    def run_step(self, batch):
        self.opt.zero_grad()
        for i in range(0, len(batch), self.microbatch):
            micro = batch[i:i + self.microbatch]
            last = i + self.microbatch >= len(batch)
            t, w = self.sampler.sample(len(micro))
            if last:
                losses = self.diffusion.training_losses(self.ddp, micro, t)
            else:
                with self.ddp.no_sync():
                    losses = self.diffusion.training_losses(self.ddp, micro, t)
            self.sampler.update_with_local_losses(t, losses.detach())
            loss = (losses * w).mean() * len(micro) / len(batch)
            if last:
                loss.backward()
            else:
                with self.ddp.no_sync():
                    loss.backward()
            self.stats += torch.tensor([(losses.detach() * w).sum().item(), float(len(micro))])
        frac = self.step / self.total
        for g in self.opt.param_groups:
            g["lr"] = self.lr * (1 - frac)
        self.opt.step()
        for rate, params in zip(self.ema_rate, self.ema_params):
            for targ, src in zip(params, self.params):
                targ.detach().mul_(rate).add_(src.detach(), alpha=1 - rate)

    def save(self):
        if dist.get_rank() == 0:
            os.makedirs("diff", exist_ok=True)
            torch.save(self.model.state_dict(), f"diff/model{self.step:06d}.pt")
            names = [n for n, _ in self.model.named_parameters()]
            for rate, params in zip(self.ema_rate, self.ema_params):
                torch.save(dict(zip(names, [p.detach() for p in params])), f"diff/ema_{rate}_{self.step:06d}.pt")
            torch.save(self.opt.state_dict(), f"diff/opt{self.step:06d}.pt")
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10 + rank)
    np.random.seed(10 + rank)
    TrainLoop(Eps(), Diffusion(), load_data(64, rank, world), 64, 32, 3e-3, "0.9,0.99", 40, 150, 320).run_loop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
