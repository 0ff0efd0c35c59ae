"""Sharded Adam with a callback that stores a checkpoint every other epoch."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Callback:
    def on_epoch_end(self, trainer, epoch, loss):
        pass


class Printer(Callback):
    def on_epoch_end(self, trainer, epoch, loss):
        if trainer.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)


class Checkpointer(Callback):
    def __init__(self, path, every):
        self.path, self.every = path, every

    def on_epoch_end(self, trainer, epoch, loss):
        if (epoch + 1) % self.every:
            return
        if trainer.rank == 0:
            trainer.opt.consolidate_state_dict(to=0)
            state = {"model": trainer.model.module.state_dict(), "opt": trainer.opt.state_dict(), "epoch": epoch}
            torch.save(state, self.path)


class Trainer:
    def __init__(self, args, callbacks):
        self.rank = dist.get_rank()
        self.callbacks = callbacks
        self.epochs = args.epochs
        net = nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 6))
        self.model = DDP(net)
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.Adam, lr=args.lr)
        self.sampler, self.loader = self.data()

    def data(self):
        g = torch.Generator().manual_seed(17)
        x = torch.randn(480, 16, generator=g)
        y = (x @ torch.randn(16, 6, generator=g)).argmax(1)
        sampler = DistributedSampler(TensorDataset(x, y))
        return sampler, DataLoader(sampler.dataset, batch_size=16, sampler=sampler)

    def fit(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.opt.step()
            for cb in self.callbacks:
                cb.on_epoch_end(self, epoch, loss.item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(args, [Printer(), Checkpointer("sharded.pt", every=2)]).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
