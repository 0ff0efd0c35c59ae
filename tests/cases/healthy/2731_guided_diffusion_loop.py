import argparse
import copy
import functools
import os

import numpy as np
import torch as th
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel.distributed import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

T = 50


class PointSet(Dataset):
    def __init__(self, shard=0, num_shards=1, n=4096):
        rng = np.random.RandomState(9)
        a = rng.rand(n) * 2 * np.pi
        pts = np.stack([np.cos(a), np.sin(a)], 1) + 0.05 * rng.randn(n, 2)
        self.local = pts[shard:][::num_shards].astype(np.float32)

    def __len__(self):
        return len(self.local)

    def __getitem__(self, i):
        return self.local[i], {}


def load_data(batch_size):
    ds = PointSet(shard=dist.get_rank(), num_shards=dist.get_world_size())
    loader = DataLoader(ds, batch_size=batch_size, shuffle=True, drop_last=True)
    while True:
        yield from loader


def sync_params(params):
    for p in params:
        with th.no_grad():
            dist.broadcast(p, 0)


class Denoiser(nn.Module):
    def __init__(self, hid=96):
        super().__init__()
        self.t = nn.Embedding(T, hid)
        self.inp = nn.Linear(2, hid)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(hid, hid), nn.SiLU(), nn.Linear(hid, hid), nn.SiLU())
        self.out = nn.Linear(hid, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        return self.out(self.body(self.inp(x) + self.t(t)))


class Diffusion:
    def __init__(self):
        betas = np.linspace(1e-3, 0.15, T)
        self.ac = th.tensor(np.cumprod(1 - betas), dtype=th.float32)

    def training_losses(self, model, x, t):
        noise = th.randn_like(x)
        a = self.ac[t][:, None]
        pred = model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
        return {"loss": ((pred - noise) ** 2).mean(1)}


class LossSecondMomentResampler:
    def __init__(self, history=10, uniform_prob=0.01):
        self.history, self.uniform_prob = history, uniform_prob
        self.h = np.zeros([T, history])
        self.counts = np.zeros([T], dtype=int)

    def weights(self):
        if not (self.counts == self.history).all():
            return np.ones([T])
        w = np.sqrt(np.mean(self.h ** 2, axis=-1))
        w /= w.sum()
        return w * (1 - self.uniform_prob) + self.uniform_prob / T

    def sample(self, n):
        p = self.weights()
        p = p / p.sum()
        ix = np.random.choice(T, size=(n,), p=p)
        return th.from_numpy(ix).long(), th.from_numpy(1 / (T * p[ix])).float()

    def update_with_local_losses(self, ts, losses):
        sizes = [th.tensor([0], dtype=th.int32) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, th.tensor([len(ts)], dtype=th.int32))
        sizes = [s.item() for s in sizes]
        m = max(sizes)
        tb = [th.zeros(m).to(ts) for _ in sizes]
        lb = [th.zeros(m).to(losses) for _ in sizes]
        dist.all_gather(tb, ts)
        dist.all_gather(lb, losses)
        for t_all, l_all, n in zip(tb, lb, sizes):
            for t, l in zip(t_all[:n].tolist(), l_all[:n].tolist()):
                if self.counts[t] == self.history:
                    self.h[t, :-1] = self.h[t, 1:]
                    self.h[t, -1] = l
                else:
                    self.h[t, self.counts[t]] = l
                    self.counts[t] += 1


def update_ema(target, source, rate):
    for a, b in zip(target, source):
        a.detach().mul_(rate).add_(b, alpha=1 - rate)


class TrainLoop:
    def __init__(self, model, diffusion, data, batch_size, microbatch, lr, ema_rate, sampler, lr_anneal_steps):
        self.model, self.diffusion, self.data, self.sampler = model, diffusion, data, sampler
        self.batch_size, self.microbatch, self.lr = batch_size, microbatch, lr
        self.ema_rate = [float(x) for x in ema_rate.split(",")]
        self.lr_anneal_steps, self.step = lr_anneal_steps, 0
        sync_params(self.model.parameters())
        self.master_params = list(self.model.parameters())
        self.opt = AdamW(self.master_params, lr=lr, weight_decay=0.0)
        self.ema_params = [copy.deepcopy(self.master_params) for _ in self.ema_rate]
        self.ddp_model = DDP(self.model, bucket_cap_mb=128, find_unused_parameters=False)
        self.acc = []

    def run_loop(self):
        while self.step < self.lr_anneal_steps:
            batch, cond = next(self.data)
            self.run_step(batch, cond)
            if self.step % 40 == 0:
                if dist.get_rank() == 0:
                    print("step", self.step, "loss", round(float(np.mean(self.acc)), 4), flush=True)
                self.acc = []
            if self.step % 80 == 0 and self.step > 0:
                self.save()
            self.step += 1
        if (self.step - 1) % 80 != 0:
            self.save()

    def run_step(self, batch, cond):
        self.forward_backward(batch, cond)
        self.opt.step()
        for rate, params in zip(self.ema_rate, self.ema_params):
            update_ema(params, self.master_params, rate)
        for g in self.opt.param_groups:
            g["lr"] = self.lr * (1 - self.step / self.lr_anneal_steps)

    def forward_backward(self, batch, cond):
        for p in self.master_params:
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        n_micro = batch.shape[0] // self.microbatch
        for i in range(0, batch.shape[0], self.microbatch):
            micro = batch[i:i + self.microbatch]
            last = (i + self.microbatch) >= batch.shape[0]
            t, weights = self.sampler.sample(micro.shape[0])
            compute = functools.partial(self.diffusion.training_losses, self.ddp_model, micro, t)
            if last:
                losses = compute()
            else:
                with self.ddp_model.no_sync():
                    losses = compute()
            self.sampler.update_with_local_losses(t, losses["loss"].detach())
            loss = (losses["loss"] * weights).mean()
            self.acc.append(loss.item())
            (loss / n_micro).backward()

    def to_state_dict(self, params):
        sd = self.model.state_dict()
        for (name, _), p in zip(self.model.named_parameters(), params):
            sd[name] = p
        return sd

    def save(self):
        for rate, params in zip([0] + self.ema_rate, [self.master_params] + self.ema_params):
            sd = self.to_state_dict(params)
            if dist.get_rank() == 0:
                th.save(sd, f"model{self.step:06d}.pt" if not rate else f"ema_{rate}_{self.step:06d}.pt")
        if dist.get_rank() == 0:
            th.save(self.opt.state_dict(), f"opt{self.step:06d}.pt")
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch_size", type=int, default=64)
    ap.add_argument("--microbatch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--ema_rate", type=str, default="0.95,0.99")
    ap.add_argument("--steps", type=int, default=240)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    th.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    TrainLoop(Denoiser(), Diffusion(), load_data(args.batch_size), args.batch_size, args.microbatch, args.lr,
              args.ema_rate, LossSecondMomentResampler(), args.steps).run_loop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
