"""Two training sessions in one process: the group is torn down after the first and built anew for the second,
which goes on from the checkpoint; at the end the first process alone reports on the test set."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CKPT, RDZV = "sessions/last.pt", os.path.abspath("sessions/rdzv")


def seed_all(value):
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    r = 0.1 + 1.4 * torch.rand(n, generator=g)
    a = 3.0 * r + np.pi * y
    x = torch.stack([r * a.cos(), r * a.sin()], 1) + 0.06 * torch.randn(n, 2, generator=g)
    return TensorDataset(x, y)


def make_net():
    return nn.Sequential(
        nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


class Averager:
    """Exponential average of the weights, with the batch-norm statistics copied."""

    def __init__(self, net, decay=0.95):
        self.decay = decay
        self.net = make_net().requires_grad_(False)
        self.net.load_state_dict(net.state_dict())

    @torch.no_grad()
    def update(self, net):
        for a, p in zip(self.net.parameters(), net.parameters()):
            a.lerp_(p, 1 - self.decay)
        for a, b in zip(self.net.buffers(), net.buffers()):
            a.copy_(b)


class Session:
    def __init__(self, number, until, total):
        self.number, self.until = number, until
        if number == 1:
            dist.init_process_group("gloo")
            if RANK == 0 and os.path.exists(RDZV):
                os.remove(RDZV)
        else:
            dist.init_process_group("gloo", init_method=f"file://{RDZV}", rank=RANK, world_size=WORLD)
        seed_all(4)
        net = make_net()
        self.model = DDP(net)
        self.avg = Averager(net)
        self.opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, nesterov=True)
        ds = spirals(1536, 1)
        self.sampler = DistributedSampler(ds, shuffle=True, seed=2)
        self.dl = DataLoader(ds, batch_size=32, sampler=self.sampler, drop_last=True)
        self.sched = torch.optim.lr_scheduler.LinearLR(self.opt, 1.0, 0.05, total_iters=total * len(self.dl))
        self.start = 0

    def load(self):
        state = torch.load(CKPT, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(state["net"])
        self.avg.net.load_state_dict(state["avg"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.start = state["epoch"]

    def save(self):
        if RANK == 0:
            torch.save({"net": self.model.module.state_dict(), "avg": self.avg.net.state_dict(),
                        "opt": self.opt.state_dict(), "sched": self.sched.state_dict(), "epoch": self.until}, CKPT)
        dist.barrier()

    def run(self):
        seed_all(7919 * self.number + RANK)
        for epoch in range(self.start, self.until):
            self.sampler.set_epoch(epoch)
            self.model.train()
            agg = torch.zeros(2, dtype=torch.float64)
            for x, y in self.dl:
                loss = F.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.avg.update(self.model.module)
                agg += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
            dist.all_reduce(agg)
            if RANK == 0:
                print(f"session {self.number} epoch {epoch} loss {agg[0] / agg[1]:.4f}")

    def close(self):
        dist.destroy_process_group()


def main():
    torch.set_num_threads(1)
    os.makedirs("sessions", exist_ok=True)
    total = 6
    first = Session(1, until=3, total=total)
    first.run()
    first.save()
    first.close()

    second = Session(2, until=total, total=total)
    second.load()
    second.run()
    second.save()
    second.close()

    if RANK == 0:
        net = second.avg.net.eval()
        x, y = spirals(800, 5).tensors
        with torch.no_grad():
            acc = (net(x).argmax(1) == y).float().mean().item()
        print(f"test accuracy of the averaged weights {acc:.3f}")
        torch.save(net.state_dict(), "sessions/final.pt")


if __name__ == "__main__":
    main()
