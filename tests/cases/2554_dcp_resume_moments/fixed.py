"""Regress a pendulum's next state; train, checkpoint with torch.distributed.checkpoint, come back and go on."""
import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pendulum(n=4096, dt=0.05):
    g = torch.Generator().manual_seed(8)
    theta = (torch.rand(n, generator=g) * 2 - 1) * math.pi
    omega = torch.randn(n, generator=g) * 2
    torque = torch.randn(n, generator=g)
    x = torch.stack([theta.sin(), theta.cos(), omega / 2, torque], dim=1)
    for _ in range(4):
        omega = omega + dt * (-9.8 * theta.sin() + torque - 0.2 * omega)
        theta = theta + dt * omega
    return TensorDataset(x, torch.stack([theta.sin(), theta.cos(), omega / 2], dim=1))


def make_model():
    return nn.Sequential(nn.Linear(4, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = DDP(make_model())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=1e-3)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda e: 0.9**e)
        data = pendulum()
        self.sampler = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)
        self.epoch = 0

    def state(self):
        optim = get_optimizer_state_dict(self.model, self.opt)
        return {"model": self.model.module.state_dict(), "optim": optim, "sched": self.sched.state_dict(), "epoch": self.epoch}

    def save(self, path):
        dcp.save(self.state(), checkpoint_id=str(path))

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=str(path), planner=DefaultLoadPlanner(allow_partial_load=True))
        self.model.module.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.opt, state["optim"])
        self.sched.load_state_dict(state["sched"])
        self.epoch = state["epoch"]

    def train(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            total, count = torch.zeros(()), 0
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += loss.detach()
                count += 1
            self.sched.step()
            total /= count
            dist.all_reduce(total)
            if self.rank == 0:
                lr = self.opt.param_groups[0]["lr"]
                print(f"epoch {self.epoch:2d} mse {total.item() / self.world:.6f} next lr {lr:.2e}", flush=True)
            self.epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--stop-after", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--dir", default="pendulum_ckpt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    path = Path(args.dir) / f"epoch{args.stop_after}"

    first = Run(args)
    first.train(args.stop_after)
    first.save(path)
    del first
    dist.barrier()

    again = Run(args)
    again.load(path)
    if again.rank == 0:
        print(f"resumed at epoch {again.epoch}", flush=True)
    again.train(args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
