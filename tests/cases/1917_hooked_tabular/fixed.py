"""Churn prediction on mixed columns with a small event-driven engine. Starts its own processes."""
import os
import sys
import tempfile
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

PARAMS = {"procs": 2, "rows": 960, "epochs": 5, "batch": 24, "lr": 5e-3, "seed": 47}


class Churn(Dataset):
    def __init__(self, rows):
        g = torch.Generator().manual_seed(10)
        self.plan = torch.randint(0, 6, (rows,), generator=g)
        self.region = torch.randint(0, 9, (rows,), generator=g)
        self.usage = torch.randn(rows, 5, generator=g)
        bias = torch.randn(6, 9, generator=g)
        logit = bias[self.plan, self.region] + 1.5 * self.usage[:, 0] * self.usage[:, 1] - self.usage[:, 2]
        self.left = (torch.rand(rows, generator=g) < torch.sigmoid(2 * logit)).float()

    def __len__(self):
        return len(self.left)

    def __getitems__(self, index):
        i = torch.tensor(index)
        return self.plan[i], self.region[i], self.usage[i], self.left[i]


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.plan, self.region = nn.Embedding(6, 6), nn.Embedding(9, 6)
        self.mlp = nn.Sequential(nn.Linear(17, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, plan, region, usage):
        return self.mlp(torch.cat([self.plan(plan), self.region(region), usage], 1)).squeeze(1)


class Engine:
    def __init__(self, step_fn):
        self.step_fn, self.handlers = step_fn, defaultdict(list)
        self.epoch, self.totals = 0, None

    def on(self, event):
        def register(fn):
            self.handlers[event].append(fn)
            return fn

        return register

    def fire(self, event):
        for fn in self.handlers[event]:
            fn(self)

    def run(self, loader, epochs):
        for self.epoch in range(epochs):
            self.totals = torch.zeros(3)
            self.fire("epoch_started")
            for batch in loader:
                self.totals += torch.tensor(self.step_fn(batch))
            self.fire("epoch_completed")


def worker(rank, params, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=params["procs"])
    torch.manual_seed(params["seed"])
    data = Churn(params["rows"])
    shard = DistributedSampler(data, shuffle=True, seed=params["seed"])
    batches = BatchSampler(shard, params["batch"], drop_last=True)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=lambda columns: columns)
    model = DDP(TabularNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"], weight_decay=0.01)

    def step(batch):
        plan, region, usage, left = batch
        logit = model(plan, region, usage)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, left)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits = ((logit > 0).float() == left).sum().item()
        return [loss.item() * len(left), hits, len(left)]

    engine = Engine(step)

    @engine.on("epoch_started")
    def reshuffle(engine):
        sampler = loader.batch_sampler.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(engine.epoch)

    @engine.on("epoch_completed")
    def report(engine):
        dist.all_reduce(engine.totals)
        if rank == 0:
            loss, hits, n = engine.totals.tolist()
            sys.stdout.write(f"epoch {engine.epoch}: loss {loss / n:.4f} accuracy {hits / n:.3f}\n")
            sys.stdout.flush()

    engine.run(loader, params["epochs"])
    dist.barrier()
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        mp.spawn(worker, args=(PARAMS, os.path.join(folder, "store")), nprocs=PARAMS["procs"], join=True)


if __name__ == "__main__":
    main()
