"""Click-through model: plain DDP for a while, then local SGD with periodic averaging of the parameters."""
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Cfg:
    users: int = 200
    items: int = 120
    dim: int = 12
    batch: int = 96
    steps: int = 241
    warmup: int = 40
    period: int = 8
    lr: float = 0.1
    out: str = "ctr.pt"


class Clicks:
    """Impressions logged per region; every process owns one region's log."""

    def __init__(self, cfg, rank, n=6000):
        base = torch.Generator().manual_seed(42)
        self.u = torch.randn(cfg.users, 4, generator=base)
        self.v = torch.randn(cfg.items, 4, generator=base)
        g = torch.Generator().manual_seed(100 + rank)
        self.user = torch.randint(0, cfg.users, (n,), generator=g)
        self.item = torch.randint(0, cfg.items, (n,), generator=g)
        p = torch.sigmoid(2.0 * self.u[self.user, 0] + 1.5 * self.v[self.item, 0] + 0.3 * (rank - 0.5))
        self.click = torch.bernoulli(p, generator=g)
        self.gen = g

    def split(self, held=800):
        cut = len(self.click) - held
        return (self.user[:cut], self.item[:cut], self.click[:cut]), (self.user[cut:], self.item[cut:], self.click[cut:])


class Tower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.user = nn.Embedding(cfg.users, cfg.dim)
        self.item = nn.Embedding(cfg.items, cfg.dim)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        self.mix = nn.Sequential(nn.Linear(3 * cfg.dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return self.mix(torch.cat([a, b, a * b], dim=1)).squeeze(1)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = DDP(Tower(cfg))
        alone, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=cfg.warmup)
        self.model.register_comm_hook(state, post_localSGD_hook)
        self.averager = PeriodicModelAverager(period=cfg.period, warmup_steps=cfg.warmup)
        self.opt = torch.optim.Adagrad(self.model.parameters(), lr=cfg.lr)
        self.data = Clicks(cfg, self.rank)
        self.train_set, self.val_set = self.data.split()
        self.loss_fn = nn.BCEWithLogitsLoss()

    def batch(self):
        pick = torch.randint(0, len(self.train_set[0]), (self.cfg.batch,), generator=self.data.gen)
        return [t[pick] for t in self.train_set]

    def train_step(self, step):
        u, i, y = self.batch()
        loss = self.loss_fn(self.model(u, i), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.averager.average_parameters(self.model.parameters())
        return loss.detach()

    @torch.no_grad()
    def evaluate(self):
        u, i, y = self.val_set
        self.model.eval()
        logits = self.model.module(u, i)
        self.model.train()
        stat = torch.stack([self.loss_fn(logits, y), ((logits > 0).float() == y).float().mean()])
        dist.all_reduce(stat)
        return (stat / self.world).tolist()

    def fit(self):
        running = torch.zeros(())
        for step in range(self.cfg.steps):
            running = 0.9 * running + 0.1 * self.train_step(step)
            if step % 40 == 0:
                val, acc = self.evaluate()
                if self.rank == 0:
                    print(json.dumps({"step": step, "train": round(running.item(), 4), "val": round(val, 4), "acc": round(acc, 3)}), flush=True)
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), self.cfg.out)


def main():
    dist.init_process_group("gloo")
    Trainer(Cfg(out=os.environ.get("CTR_OUT", "ctr.pt"))).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
