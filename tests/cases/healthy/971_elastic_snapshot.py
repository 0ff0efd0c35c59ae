"""Elastic style: the trainer keeps a snapshot, a preemption tears the process group down in mid-run, and training goes on from the snapshot."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Preempted(RuntimeError):
    pass


class Trainer:
    def __init__(self, snapshot, epochs):
        self.snapshot, self.epochs, self.start = snapshot, epochs, 0
        self.rank = dist.get_rank()
        torch.manual_seed(7)
        self.model = DDP(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3)))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=4e-3)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 2, 0.5)
        g = torch.Generator().manual_seed(2)
        x = torch.randn(360, 12, generator=g)
        data = TensorDataset(x, x[:, :3].argmax(1))
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=20, sampler=self.sampler)
        if os.path.exists(snapshot):
            self.restore()

    def restore(self):
        state = torch.load(self.snapshot, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.start = state["epoch"]
        if self.rank == 0:
            print(f"resuming at epoch {self.start}, lr {self.sched.get_last_lr()[0]:.4f}")

    def save(self, epoch):
        state = {"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(), "epoch": epoch + 1}
        torch.save(state, self.snapshot + ".tmp")
        os.replace(self.snapshot + ".tmp", self.snapshot)

    def fit(self, die_in):
        for epoch in range(self.start, self.epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(1)
            for i, (x, y) in enumerate(self.loader):
                if epoch == die_in and i == 4:
                    raise Preempted  # every worker gets the signal
                loss = F.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += loss.detach()
            self.sched.step()
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {total.item() / len(self.loader) / dist.get_world_size():.4f}")
                self.save(epoch)
            dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--preempt-in", type=int, default=3)
    args = ap.parse_args()
    die_in = args.preempt_in
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    home = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(home, src=0)
    snapshot = os.path.join(home[0], "snapshot.pt")
    attempt = 0
    while True:
        try:
            Trainer(snapshot, args.epochs).fit(die_in)
            break
        except Preempted:
            if dist.get_rank() == 0:
                print("preempted; new rendezvous")
            dist.barrier()
            dist.destroy_process_group()
            attempt += 1  # a rendezvous of its own for each attempt: keys of the last one are stale
            dist.init_process_group("gloo", init_method=f"file://{home[0]}/rendezvous{attempt}", rank=rank, world_size=world)
            die_in = None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
