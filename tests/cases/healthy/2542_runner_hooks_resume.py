"""Registry, runner and hooks; the first runner is stopped within an epoch, a second one carries on from the file."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Registry(dict):
    def register(self, cls):
        self[cls.__name__] = cls
        return cls

    def build(self, cfg, **kw):
        cfg = dict(cfg)
        return self[cfg.pop("type")](**cfg, **kw)


MODELS, HOOKS, DATASETS = Registry(), Registry(), Registry()


@DATASETS.register
class Spirals(Dataset):
    def __init__(self, n, seed, jitter=0.0):
        r = np.random.default_rng(seed)
        self.y = r.integers(0, 3, n)
        t = r.uniform(0.3, 1.0, n)
        a = t * 5 + self.y * 2 * np.pi / 3
        self.x = np.stack([t * np.cos(a), t * np.sin(a)], 1).astype(np.float32) + r.normal(0, 0.02, (n, 2)).astype(np.float32)
        self.jitter = jitter

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i] + np.float32(self.jitter) * np.random.randn(2).astype(np.float32), self.y[i]


@MODELS.register
class Classifier(nn.Module):
    def __init__(self, hidden, p):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Dropout(p), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x, y=None):
        z = self.net(x * 3)
        return z if y is None else F.cross_entropy(z, y)


class ResumableSampler(Sampler):
    def __init__(self, n, rank, world, seed=0):
        self.n, self.rank, self.world, self.seed = n // world * world, rank, world, seed
        self.epoch, self.start = 0, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        own = torch.randperm(self.n, generator=g)[self.rank::self.world].tolist()
        return iter(own[self.start:])

    def __len__(self):
        return self.n // self.world - self.start


class Hook:
    def __getattr__(self, name):
        if name.startswith(("before_", "after_")):
            return lambda runner: None
        raise AttributeError(name)


@HOOKS.register
class OptimizerHook(Hook):
    def __init__(self, clip):
        self.clip = clip

    def after_train_iter(self, r):
        r.optimizer.zero_grad()
        r.loss.backward()
        nn.utils.clip_grad_norm_(r.model.parameters(), self.clip)
        r.optimizer.step()
        r.scheduler.step()


@HOOKS.register
class LoggerHook(Hook):
    def __init__(self, every):
        self.every, self.buf = every, []

    def after_train_iter(self, r):
        self.buf.append(r.loss.detach())
        if r.iter % self.every == 0:
            v = torch.stack(self.buf).mean()
            dist.all_reduce(v)
            self.buf.clear()
            if r.rank == 0:
                print(f"Epoch({r.epoch}) [{r.iter}/{r.max_iters}] lr {r.scheduler.get_last_lr()[0]:.4f} loss {v.item() / r.world:.4f}", flush=True)


@HOOKS.register
class EMAHook(Hook):
    def __init__(self, momentum):
        self.m = momentum

    def before_run(self, r):
        if r.ema is None:
            r.ema = {k: v.clone() for k, v in r.model.module.state_dict().items()}

    def after_train_iter(self, r):
        for k, v in r.model.module.state_dict().items():
            r.ema[k].lerp_(v, self.m)


@HOOKS.register
class EvalHook(Hook):
    def after_train_epoch(self, r):
        net = MODELS.build(r.cfg["model"]).eval()
        net.load_state_dict(r.ema)
        ds = r.val
        ids = range(r.rank, len(ds), r.world)
        with torch.no_grad():
            ok = (net(torch.from_numpy(ds.x[list(ids)])).argmax(1) == torch.from_numpy(ds.y[list(ids)])).sum().float()
        dist.all_reduce(ok)
        if r.rank == 0:
            print(f"Epoch(val) [{r.epoch}] accuracy {ok.item() / len(ds):.4f}", flush=True)


@HOOKS.register
class CheckpointHook(Hook):
    def __init__(self, interval):
        self.interval = interval

    def after_train_iter(self, r):
        if r.iter % self.interval == 0:
            r.save()


class Runner:
    def __init__(self, cfg, resume=None):
        self.cfg, self.rank, self.world = cfg, dist.get_rank(), dist.get_world_size()
        seed = cfg["seed"] + self.rank
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        self.train, self.val = DATASETS.build(cfg["train"]), DATASETS.build(cfg["val"])
        self.sampler = ResumableSampler(len(self.train), self.rank, self.world, cfg["seed"])
        self.loader = DataLoader(self.train, cfg["batch"], sampler=self.sampler)
        self.per_epoch = -(-len(self.sampler) // cfg["batch"])
        self.max_iters = self.per_epoch * cfg["epochs"]
        self.model = DDP(MODELS.build(cfg["model"]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cfg["lr"], momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.max_iters)
        self.hooks = [HOOKS.build(h) for h in cfg["hooks"]]
        self.epoch, self.iter, self.ema, self.rng = 0, 0, None, None
        if resume:
            self.load(resume)

    def call(self, name):
        for h in self.hooks:
            getattr(h, name)(self)

    def save(self):
        rng = [None] * self.world
        dist.all_gather_object(rng, (torch.get_rng_state(), np.random.get_state(), random.getstate()))
        if self.rank == 0:
            os.makedirs("work_dir", exist_ok=True)
            torch.save({"model": self.model.module.state_dict(), "optim": self.optimizer.state_dict(), "ema": self.ema,
                        "sched": self.scheduler.state_dict(), "iter": self.iter, "epoch": self.epoch, "rng": rng}, "work_dir/tmp.pth")
            os.replace("work_dir/tmp.pth", "work_dir/latest.pth")
        dist.barrier()

    def load(self, path):
        ck = torch.load(path, map_location="cpu", weights_only=False)
        self.model.module.load_state_dict(ck["model"])
        self.optimizer.load_state_dict(ck["optim"])
        self.scheduler.load_state_dict(ck["sched"])
        self.ema, self.iter, self.epoch, self.rng = ck["ema"], ck["iter"], ck["epoch"], ck["rng"][self.rank]

    def run(self, stop_at=None):
        self.call("before_run")
        while self.epoch < self.cfg["epochs"]:
            self.sampler.epoch = self.epoch
            self.sampler.start = (self.iter - self.epoch * self.per_epoch) * self.cfg["batch"]
            self.model.train()
            it = iter(self.loader)
            if self.rng is not None:
                torch.set_rng_state(self.rng[0]), np.random.set_state(self.rng[1]), random.setstate(self.rng[2])
                self.rng = None
            for x, y in it:
                self.loss = self.model(x, y)
                self.iter += 1
                self.call("after_train_iter")
                if stop_at and self.iter >= stop_at:
                    return
            self.call("after_train_epoch")
            self.epoch += 1


CFG = dict(seed=5, batch=32, epochs=8, lr=0.1, model=dict(type="Classifier", hidden=64, p=0.05),
           train=dict(type="Spirals", n=1500, seed=1, jitter=0.01), val=dict(type="Spirals", n=301, seed=2),
           hooks=[dict(type="OptimizerHook", clip=2.0), dict(type="EMAHook", momentum=0.1), dict(type="LoggerHook", every=24),
                  dict(type="CheckpointHook", interval=40), dict(type="EvalHook")])

if __name__ == "__main__":
    dist.init_process_group("gloo")
    Runner(CFG).run(stop_at=90)
    Runner(CFG, resume="work_dir/latest.pth").run()
    dist.destroy_process_group()
