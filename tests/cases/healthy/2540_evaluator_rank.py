"""Two processes train; a third one holds the validation data, evaluates snapshots and decides when to stop."""
import os
import tempfile
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TRAINERS = [0, 1]
EVALUATOR = 2


def model_fn():
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def data(n, seed, noise):
    x = torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))
    w = torch.randn(10, 10, 3, generator=torch.Generator().manual_seed(4))
    y = torch.einsum("ni,nj,ijc->nc", x, x, w).argmax(1)
    g = torch.Generator().manual_seed(seed + 1)
    flip = torch.rand(n, generator=g) < noise
    return TensorDataset(x, torch.where(flip, torch.randint(3, (n,), generator=g), y))


@dataclass
class Patience:
    limit: int = 3
    best: float = float("inf")
    bad: int = 0
    log: list = field(default_factory=list)

    def update(self, v):
        self.log.append(v)
        if v < self.best - 1e-3:
            self.best, self.bad = v, 0
            return True
        self.bad += 1
        return False

    @property
    def exhausted(self):
        return self.bad >= self.limit


def tensors(m):
    return [t for _, t in sorted(m.state_dict().items())]


def trainer(rank, train_pg, max_epochs):
    torch.manual_seed(50 + rank)
    net = model_fn()
    ddp = DDP(net, process_group=train_pg)
    ds = data(1500, 1, 0.15)
    sampler = DistributedSampler(ds, num_replicas=len(TRAINERS), rank=rank)
    loader = DataLoader(ds, batch_size=50, sampler=sampler)
    opt = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
    verdict = torch.zeros(1)
    for epoch in range(max_epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        stat = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stat += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(stat, group=train_pg)
        if rank == 0:
            dist.send(stat, dst=EVALUATOR)
            for t in tensors(net):
                dist.send(t, dst=EVALUATOR)
        dist.broadcast(verdict, src=EVALUATOR)
        if verdict.item() > 0:
            break
    if rank == 0:
        print(f"trainers left after epoch {epoch}", flush=True)


def evaluator(max_epochs):
    net = model_fn().eval()
    x, y = data(500, 2, 0.0).tensors
    keeper, stat = Patience(), torch.zeros(2)
    for epoch in range(max_epochs):
        dist.recv(stat, src=0)
        for t in tensors(net):
            dist.recv(t, src=0)
        with torch.no_grad():
            out = net(x)
            vl = F.cross_entropy(out, y).item()
            acc = (out.argmax(1) == y).float().mean().item()
        if keeper.update(vl):
            torch.save(net.state_dict(), "best.pt")
        print(f"epoch {epoch} train {stat[0] / stat[1]:.4f} val {vl:.4f} acc {acc:.3f} bad {keeper.bad}", flush=True)
        dist.broadcast(torch.tensor([float(keeper.exhausted)]), src=EVALUATOR)
        if keeper.exhausted:
            break
    net.load_state_dict(torch.load("best.pt"))
    print(f"best val {keeper.best:.4f}", flush=True)


def entry(rank, store, max_epochs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    train_pg = dist.new_group(TRAINERS)
    if rank == EVALUATOR:
        evaluator(max_epochs)
    else:
        trainer(rank, train_pg, max_epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as d:
        mp.spawn(entry, args=(os.path.join(d, "store"), 40), nprocs=3)
