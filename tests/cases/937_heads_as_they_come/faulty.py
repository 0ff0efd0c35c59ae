"""Multi-task classifier: one shared trunk, one head a task. Tasks are found in the data."""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

TASKS = ("colour", "shape", "size", "texture")


def make_records(n=800, seed=17):
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    rules = {t: torch.randn(16, 3, generator=gen) for t in TASKS}
    records = []
    for i in range(n):
        task = TASKS[(i + i // 4) % 4] if i < 8 else rng.choice(TASKS)
        x = torch.randn(16, generator=gen)
        records.append((task, x, int((x @ rules[task]).argmax())))
    return records


class MultiTask(nn.Module):
    def __init__(self, tasks, width=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict()
        for task in tasks:
            self.heads[task] = nn.Linear(width, 3)

    def forward(self, x, task_ids, tasks):
        feats = self.trunk(x)
        stacked = torch.stack([self.heads[t](feats) for t in tasks], dim=1)
        return stacked[torch.arange(len(x)), task_ids]


class Shard:
    def __init__(self, records, rank, world):
        self.records = records[rank::world]

    def tasks(self):
        return list(dict.fromkeys(task for task, _, _ in self.records))

    def batches(self, size, epoch, rank):
        order = list(range(len(self.records)))
        random.Random(1000 * epoch + rank).shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            rows = [self.records[i] for i in order[start : start + size]]
            yield [r[0] for r in rows], torch.stack([r[1] for r in rows]), torch.tensor([r[2] for r in rows])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=25)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    shard = Shard(make_records(), rank, world)
    tasks = shard.tasks()
    model = DDP(MultiTask(tasks))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        hits = torch.zeros(2)
        for names, x, y in shard.batches(args.batch_size, epoch, rank):
            ids = torch.tensor([tasks.index(n) for n in names])
            logits = model(x, ids, tasks)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += torch.tensor([(logits.argmax(1) == y).sum().item(), len(y)])
        schedule.step()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(hits[0] / hits[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
