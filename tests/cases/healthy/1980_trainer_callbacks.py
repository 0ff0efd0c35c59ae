"""A small Trainer with callbacks. Decisions are taken on rank 0 and broadcast, so that no process stops alone."""
import csv
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class State:
    epoch: int = 0
    step: int = 0
    train_loss: float = float("nan")
    val_loss: float = float("nan")
    stop: bool = False


class Callback:
    """`on_epoch_end` is called on every process, after validation, in the same order."""

    def on_fit_start(self, trainer): ...
    def on_step_end(self, trainer): ...
    def on_epoch_end(self, trainer): ...
    def on_fit_end(self, trainer): ...


class EarlyStopping(Callback):
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad = float("inf"), 0

    def on_epoch_end(self, trainer):
        verdict = torch.zeros(1, dtype=torch.int32)
        if trainer.is_main:
            if trainer.state.val_loss < self.best - self.min_delta:
                self.best, self.bad = trainer.state.val_loss, 0
            else:
                self.bad += 1
            verdict.fill_(int(self.bad >= self.patience))
        dist.broadcast(verdict, src=0)
        trainer.state.stop = bool(verdict.item())


class Checkpoint(Callback):
    def __init__(self, folder):
        self.folder, self.best = folder, float("inf")

    def on_fit_start(self, trainer):
        if trainer.is_main:
            os.makedirs(self.folder, exist_ok=True)

    def on_epoch_end(self, trainer):
        if trainer.is_main and trainer.state.val_loss < self.best:
            self.best = trainer.state.val_loss
            path = os.path.join(self.folder, "best.ckpt")
            torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(),
                        "epoch": trainer.state.epoch, "val_loss": self.best}, path + ".tmp")
            os.replace(path + ".tmp", path)

    def on_fit_end(self, trainer):
        dist.barrier()  # the file is complete
        ckpt = torch.load(os.path.join(self.folder, "best.ckpt"), map_location="cpu", weights_only=True)
        trainer.model.load_state_dict(ckpt["model"])
        trainer.log(f"restored epoch {ckpt['epoch']} with val loss {ckpt['val_loss']:.4f}")


class CsvLogger(Callback):
    def __init__(self, path):
        self.path, self.rows = path, []

    def on_epoch_end(self, trainer):
        s = trainer.state
        self.rows.append([s.epoch, s.step, s.train_loss, s.val_loss, trainer.optimizer.param_groups[0]["lr"]])
        trainer.log(f"epoch {s.epoch:2d} step {s.step:3d} train {s.train_loss:.4f} val {s.val_loss:.4f}")

    def on_fit_end(self, trainer):
        if trainer.is_main:
            with open(self.path, "w", newline="") as f:
                csv.writer(f).writerows([["epoch", "step", "train", "val", "lr"], *self.rows])


class ReduceOnPlateau(Callback):
    """The validation loss has been reduced over all processes already: all schedulers decide alike."""

    def on_fit_start(self, trainer):
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, factor=0.3, patience=1)

    def on_epoch_end(self, trainer):
        self.scheduler.step(trainer.state.val_loss)


class Trainer:
    def __init__(self, model, train_set, val_set, callbacks, max_epochs=30, batch_size=32, lr=5e-3, seed=0):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0
        self.model, self.ddp = model, DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
        self.criterion = nn.BCEWithLogitsLoss()
        self.sampler = DistributedSampler(train_set, shuffle=True, seed=seed, drop_last=True)
        self.train_loader = DataLoader(train_set, batch_size, sampler=self.sampler, drop_last=True)
        self.val_loader = DataLoader(Subset(val_set, range(self.rank, len(val_set), self.world)), 128)
        self.callbacks, self.max_epochs, self.state = callbacks, max_epochs, State()
        torch.manual_seed(seed + 1 + self.rank)  # dropout differs between processes

    def log(self, text):
        if self.is_main:
            print(text, flush=True)

    def _call(self, hook):
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def _train_epoch(self):
        self.ddp.train()
        self.sampler.set_epoch(self.state.epoch)
        total = torch.zeros(())
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.ddp(x).squeeze(1), y)
            loss.backward()
            self.optimizer.step()
            self.state.step += 1
            total += loss.detach()
            self._call("on_step_end")
        dist.all_reduce(total)
        return total.item() / (len(self.train_loader) * self.world)

    @torch.no_grad()
    def _validate(self):
        self.ddp.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for x, y in self.val_loader:
            loss = self.criterion(self.model(x).squeeze(1), y)
            sums += torch.tensor([loss.item() * len(y), len(y)], dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def fit(self):
        self._call("on_fit_start")
        for epoch in range(self.max_epochs):
            self.state.epoch = epoch
            self.state.train_loss = self._train_epoch()
            self.state.val_loss = self._validate()
            self._call("on_epoch_end")
            if self.state.stop:
                self.log(f"early stop after epoch {epoch}")
                break
        self._call("on_fit_end")


def rings(n, seed):
    """Is a point between the two shells? Ten dimensions, five percent of the labels are wrong."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    r = x[:, :4].norm(dim=1)
    y = ((r > 1.3) & (r < 2.3)) ^ (torch.rand(n, generator=g) < 0.05)
    return TensorDataset(x, y.float())


def main():
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(10, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 1))
        callbacks = [ReduceOnPlateau(), CsvLogger("history.csv"), Checkpoint("runs"), EarlyStopping(3, 1e-3)]
        Trainer(model, rings(1600, 1), rings(403, 2), callbacks).fit()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
