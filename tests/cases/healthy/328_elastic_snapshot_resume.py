"""Trains half way, writes a snapshot, starts over from it: model, optimizer, schedule, epoch, generator states."""
import argparse
import os
import random
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_train_objs():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(256, 20, generator=g)
    train_set = TensorDataset(x, x[:, :3].sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return train_set, model, optimizer, scheduler


class Trainer:
    def __init__(self, snapshot_path, save_every):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dataset, self.model, self.optimizer, self.scheduler = load_train_objs()
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=16, sampler=self.sampler)
        self.snapshot_path, self.save_every, self.epochs_run = snapshot_path, save_every, 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.ddp = DDP(self.model)

    def _rng(self):
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}

    def _load_snapshot(self):
        snap = torch.load(self.snapshot_path, map_location="cpu", weights_only=False)
        self.model.load_state_dict(snap["MODEL_STATE"])
        self.optimizer.load_state_dict(snap["OPTIMIZER"])
        self.scheduler.load_state_dict(snap["SCHEDULER"])
        self.epochs_run = snap["EPOCHS_RUN"]
        rng = snap["RNG"][self.rank]
        torch.set_rng_state(rng["torch"])
        np.random.set_state(rng["numpy"])
        random.setstate(rng["python"])
        if self.rank == 0:
            print(f"Resuming training from snapshot at epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        states = [None] * self.world
        dist.all_gather_object(states, self._rng())
        if self.rank == 0:
            tmp = self.snapshot_path + ".tmp"
            torch.save({"MODEL_STATE": self.ddp.module.state_dict(), "OPTIMIZER": self.optimizer.state_dict(),
                        "SCHEDULER": self.scheduler.state_dict(), "EPOCHS_RUN": epoch + 1, "RNG": states}, tmp)
            os.replace(tmp, self.snapshot_path)
        dist.barrier()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(())
            for source, targets in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.ddp(source + 0.01 * torch.randn_like(source)), targets)
                loss.backward()
                self.optimizer.step()
                total += loss.detach()
            self.scheduler.step()
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"Epoch {epoch} | loss {total / len(self.loader) / self.world:.4f} | lr {self.scheduler.get_last_lr()[0]:.4f}")
            if (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--total-epochs", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    path = os.path.join(box[0], "snapshot.pt")
    Trainer(path, save_every=1).train(args.total_epochs // 2)  # ... and then the node goes away
    Trainer(path, save_every=2).train(args.total_epochs)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()
