"""Snapshotting trainer; `run()` is called again after a pre-emption."""
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Preempted(Exception):
    pass


class Job:
    SNAPSHOT = pathlib.Path("snapshot.pt")

    def __init__(self, epochs, limit=None):
        torch.manual_seed(5)
        g = torch.Generator().manual_seed(0)
        x = torch.randn(384, 10, generator=g)
        self.data = TensorDataset(x, (x[:, ::2] * x[:, 1::2]).sum(1, keepdim=True))
        self.sampler = DistributedSampler(self.data, seed=2)
        self.loader = DataLoader(self.data, 16, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=4e-3)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
        self.epochs, self.limit, self.epoch = epochs, limit, 0
        if self.SNAPSHOT.exists():
            self.restore()

    def restore(self):
        s = torch.load(self.SNAPSHOT, weights_only=True)
        self.model.module.load_state_dict(s["model"])
        self.opt.load_state_dict(s["opt"])
        self.sched.load_state_dict(s["sched"])
        self.epoch = s["epoch"]

    def snapshot(self):
        if dist.get_rank() == 0:
            state = {"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                     "sched": self.sched.state_dict(), "epoch": self.epoch}
            tmp = self.SNAPSHOT.with_suffix(".tmp")
            torch.save(state, tmp)
            tmp.replace(self.SNAPSHOT)
        dist.barrier()

    def run(self):
        for self.epoch in range(self.epochs):
            if self.limit is not None and self.epoch == self.limit:
                self.snapshot()
                raise Preempted(f"before epoch {self.epoch}")
            self.sampler.set_epoch(self.epoch)
            total = torch.zeros(2)
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += torch.tensor([loss.item() * len(x), len(x)])
            self.sched.step()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch}: {(total[0] / total[1]).item():.4f} lr {self.sched.get_last_lr()[0]:.2e}")


def main():
    dist.init_process_group("gloo")
    try:
        Job(epochs=5, limit=3).run()
    except Preempted as stop:
        if os.environ["RANK"] == "0":
            print("pre-empted", stop)
    Job(epochs=5).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
