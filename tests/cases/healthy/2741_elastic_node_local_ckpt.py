import argparse
import io
import os
import shutil
from typing import Optional

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(60)
        glyph = (torch.rand(10, 8, 8, generator=g) > 0.55).float()
        g.manual_seed(seed)
        self.y = torch.randint(0, 10, (n,), generator=g)
        self.x = (glyph[self.y] + 1.0 * torch.randn(n, 8, 8, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ElasticDistributedSampler(DistributedSampler):
    """Goes on within an epoch from a number of samples already seen by all processes together."""

    def __init__(self, dataset, start_index=0, **kw):
        super().__init__(dataset, **kw)
        self.start_index = start_index

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        ix = torch.randperm(len(self.dataset), generator=g).tolist()[self.start_index:]
        n = -(-len(ix) // self.num_replicas)
        ix += ix[:n * self.num_replicas - len(ix)]
        return iter(ix[self.rank::self.num_replicas])

    def __len__(self):
        return -(-(len(self.dataset) - self.start_index) // self.num_replicas)


class State:
    def __init__(self, arch, model, optimizer):
        self.epoch, self.seen, self.best_acc1 = 0, 0, 0.0
        self.arch, self.model, self.optimizer = arch, model, optimizer

    def capture(self):
        return {"epoch": self.epoch, "seen": self.seen, "best": self.best_acc1, "arch": self.arch,
                "state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def apply(self, obj):
        self.epoch, self.seen, self.best_acc1 = obj["epoch"], obj["seen"], obj["best"]
        self.model.load_state_dict(obj["state_dict"])
        self.optimizer.load_state_dict(obj["optimizer"])

    def save(self, f):
        torch.save(self.capture(), f)

    def load(self, f):
        self.apply(torch.load(f, map_location="cpu", weights_only=True))


def load_checkpoint(path, state):
    """Only some nodes hold a snapshot; the freshest is sent to all the others."""
    if os.path.isfile(path):
        state.load(path)
    pg = dist.new_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    progress = torch.zeros(world, dtype=torch.int64)
    progress[rank] = state.epoch * 1_000_000 + state.seen
    dist.all_reduce(progress, op=dist.ReduceOp.SUM, group=pg)
    src = int(torch.argmax(progress))
    if int(progress[src]) == 0:
        dist.destroy_process_group(pg)
        return state
    with io.BytesIO() as f:
        torch.save(state.capture(), f)
        raw = np.frombuffer(f.getvalue(), dtype=np.uint8).copy()
    size = torch.tensor([len(raw)])
    dist.broadcast(size, src=src, group=pg)
    blob = torch.from_numpy(raw) if rank == src else torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(blob, src=src, group=pg)
    if rank != src:
        with io.BytesIO(blob.numpy().tobytes()) as f:
            state.apply(torch.load(f, map_location="cpu", weights_only=True))
    dist.barrier(group=pg)
    dist.destroy_process_group(pg)
    return state


def save_checkpoint(state, is_best, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    tmp = path + ".tmp"
    torch.save(state.capture(), tmp)
    os.rename(tmp, path)
    if is_best:
        shutil.copyfile(path, os.path.join(os.path.dirname(path), "best.pt"))


def validate(model, loader):
    model.eval()
    s = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            s += torch.tensor([(model.module(x).argmax(1) == y).sum().item(), len(y)])
    model.train()
    return (s[0] / s[1]).item()


def run(args, stop_after: Optional[int]):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank * 7)
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 36, 10))
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    train, val = Digits(1500, 1), Digits(256, 2)
    sampler = ElasticDistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, num_workers=0)
    val_loader = DataLoader(val, batch_size=64, shuffle=False)
    path = os.path.join(f"node{rank // args.procs_per_node}", "snapshot.pt")
    state = load_checkpoint(path, State("tiny", model, opt))
    print(f"=> process {rank} starts at epoch {state.epoch}, {state.seen} samples seen", flush=True)
    steps = 0
    while state.epoch < args.epochs:
        sampler.set_epoch(state.epoch)
        sampler.start_index = state.seen
        for g in opt.param_groups:
            g["lr"] = 0.1 * (0.1 ** (state.epoch // 3))
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
            state.seen += args.batch * world
            if stop_after is not None and steps == stop_after:
                if rank == 0:
                    save_checkpoint(state, False, path)
                dist.barrier()
                return None
        acc = validate(model, val_loader)
        state.epoch, state.seen = state.epoch + 1, 0
        best = acc > state.best_acc1
        state.best_acc1 = max(acc, state.best_acc1)
        if rank == 0:
            print(f"epoch {state.epoch} loss {loss.item():.4f} acc {acc:.4f} lr {opt.param_groups[0]['lr']}", flush=True)
            save_checkpoint(state, best, path)
    return state.best_acc1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--procs-per-node", type=int, default=1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run(args, stop_after=60)
    best = run(args, stop_after=None)
    if dist.get_rank() == 0:
        print("best", best)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
