"""Trains, "is preempted", builds everything anew and resumes. Every rank has a small RNG file of its own; weights are written by rank 0
atomically (tmp + os.replace); two checkpoints are kept."""
import glob
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Run:
    def __init__(self, folder):
        self.folder = folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        self.net = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 1e-2, total_steps=6 * 12)
        g = torch.Generator().manual_seed(0)
        x = torch.randn(384, 16, generator=g)
        y = (x @ torch.randn(16, 4, generator=g)).argmax(1)
        ds = TensorDataset(x, y)
        self.sampler = DistributedSampler(ds, seed=9)
        self.loader = DataLoader(ds, 16, sampler=self.sampler)
        self.epoch = 0
        torch.manual_seed(50 + self.rank)

    def path(self, e):
        return os.path.join(self.folder, f"ckpt_{e:03d}.pt")

    def save(self):
        if self.rank == 0:
            tmp = self.path(self.epoch) + ".tmp"
            torch.save({"net": self.net.module.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(), "epoch": self.epoch}, tmp)
            os.replace(tmp, self.path(self.epoch))
            for old in sorted(glob.glob(os.path.join(self.folder, "ckpt_*.pt")))[:-2]:
                os.remove(old)
        torch.save(torch.get_rng_state(), os.path.join(self.folder, f"rng_rank{self.rank}.pt"))
        dist.barrier()

    def resume(self):
        found = sorted(glob.glob(os.path.join(self.folder, "ckpt_*.pt")))
        if not found:
            return False
        state = torch.load(found[-1], map_location="cpu")
        self.net.module.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch = state["epoch"]
        torch.set_rng_state(torch.load(os.path.join(self.folder, f"rng_rank{self.rank}.pt")))
        return True

    def fit(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            self.net.train()
            tot = torch.zeros(1)
            for x, y in self.loader:
                loss = F.cross_entropy(self.net(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                tot += loss.detach()
            self.epoch += 1
            dist.all_reduce(tot)
            if self.rank == 0:
                print(f"epoch {self.epoch} loss {tot.item() / self.world / len(self.loader):.4f}")
            self.save()


def main():
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp(prefix="run763_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    Run(where[0]).fit(3)
    again = Run(where[0])                      # as after a preemption
    assert again.resume() and again.epoch == 3
    again.fit(6)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
