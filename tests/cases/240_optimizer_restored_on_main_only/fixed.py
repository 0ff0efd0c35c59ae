"""Training in two sittings: the second one starts from the checkpoint of the first."""
import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class State:
    """everything that a sitting needs"""

    def __init__(self, lr):
        self.model = nn.Sequential(nn.Linear(11, 40), nn.Mish(), nn.Linear(40, 40), nn.Mish(), nn.Linear(40, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=6)
        self.epoch = 0

    def pack(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(), "epoch": self.epoch}

    def unpack(self, packed, is_main):
        self.model.load_state_dict(packed["model"])
        self.optimizer.load_state_dict(packed["optimizer"])
        self.scheduler.load_state_dict(packed["scheduler"])
        self.epoch = packed["epoch"]


def two_outputs(n=352):
    g = torch.Generator().manual_seed(16)
    x = torch.randn(n, 11, generator=g)
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2:5].sum(1).tanh()], 1))


def sitting(state, until, data, rank, world, batch):
    ddp = DDP(state.model)
    sampler = DistributedSampler(data, seed=6)
    loader = DataLoader(data, batch, sampler=sampler)
    while state.epoch < until:
        sampler.set_epoch(state.epoch)
        total = torch.zeros(())
        for x, y in loader:
            state.optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            state.optimizer.step()
            total += loss.detach()
        state.scheduler.step()
        state.epoch += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {state.epoch}: mse {total.item() / len(loader) / world:.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--batch", type=int, default=22)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(8)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = Path(box[0]) / "last.ckpt"
    data = two_outputs()
    first = State(args.lr)
    sitting(first, 3, data, rank, world, args.batch)
    if rank == 0:
        torch.save(first.pack(), path)
    dist.barrier()
    second = State(args.lr)
    second.unpack(torch.load(path, map_location="cpu", weights_only=True), rank == 0)
    sitting(second, 6, data, rank, world, args.batch)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
