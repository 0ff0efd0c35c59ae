"""Two tasks from one stream of shard files; loader workers split the shards, ranks agree on when an epoch is over."""
import json
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ROOT, SHARDS, WORKERS, BATCH, EPOCHS = Path("shards"), 10, 2, 16, 4


def write_shards():
    rng = random.Random(0)
    g = torch.Generator().manual_seed(0)
    w_cls, w_reg = torch.randn(12, 4, generator=g), torch.randn(12, generator=g)
    ROOT.mkdir(exist_ok=True)
    for s in range(SHARDS):
        with open(ROOT / f"{s:03d}.jsonl", "w") as f:
            for _ in range(rng.randrange(110, 150)):                 # shards are not of one size
                x = torch.randn(12, generator=g)
                if rng.random() < 0.6:
                    row = {"task": "cls", "x": x.tolist(), "y": int((x @ w_cls).argmax())}
                else:
                    row = {"task": "reg", "x": x.tolist(), "y": float(torch.tanh(x @ w_reg * 0.5))}
                f.write(json.dumps(row) + "\n")


class Stream(IterableDataset):
    """yields whole batches of a single task; nothing of a shard is read by two workers"""

    def __init__(self, rank, world, seed):
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        n, i = (info.num_workers, info.id) if info else (1, 0)
        files = sorted(ROOT.glob("*.jsonl"))
        random.Random(f"{self.seed}-{self.epoch}").shuffle(files)       # str seeds do not depend on the hash seed
        own = files[self.rank * n + i::self.world * n]
        rng = random.Random(f"{self.seed}-{self.epoch}-{self.rank}-{i}")
        pool = {"cls": [], "reg": []}
        for path in own:
            lines = path.read_text().splitlines()
            rng.shuffle(lines)
            for line in lines:
                row = json.loads(line)
                bucket = pool[row["task"]]
                bucket.append(row)
                if len(bucket) == BATCH:
                    yield row["task"], torch.tensor([r["x"] for r in bucket]), torch.tensor([r["y"] for r in bucket])
                    bucket.clear()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"cls": nn.Linear(64, 4), "reg": nn.Linear(64, 1)})

    def forward(self, task, x):
        return self.heads[task](self.trunk(x))


def objective(task, out, y):
    return F.cross_entropy(out, y) if task == "cls" else F.mse_loss(out.squeeze(1), y)


def both_have_data(batch):
    flag = torch.tensor([0 if batch is None else 1])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def together(loader):
    it = iter(loader)
    while both_have_data(batch := next(it, None)):
        yield batch


class Meter:
    def __init__(self):
        self.table = torch.zeros(2, 2)

    def add(self, task, value, n=1):
        self.table[0 if task == "cls" else 1] += torch.tensor([value, n])

    def result(self):
        t = self.table.clone()
        dist.all_reduce(t)
        return {k: round((t[i, 0] / t[i, 1].clamp(min=1)).item(), 4) for i, k in enumerate(("cls", "reg"))}


@torch.no_grad()
def holdout(model, files, rank, world):
    model.eval()
    meter = Meter()
    rows = [json.loads(line) for f in files for line in f.read_text().splitlines()][rank::world]
    for task in ("cls", "reg"):
        part = [r for r in rows if r["task"] == task]
        x, y = torch.tensor([r["x"] for r in part]), torch.tensor([r["y"] for r in part])
        meter.add(task, objective(task, model(task, x), y).item() * len(part), len(part))
    model.train()
    return meter.result()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards()
        ROOT.joinpath("000.jsonl").rename("holdout.txt")
    dist.barrier()
    torch.manual_seed(4)
    # a step may use different heads on different ranks
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    stream = Stream(rank, world, seed=5)
    loader = DataLoader(stream, batch_size=None, num_workers=WORKERS)
    steps = 0
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)                 # the workers are started anew below and get this copy
        meter, source = Meter(), together(loader)
        for task, x, y in source:
            loss = objective(task, model(task, x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.add(task, loss.item())
            steps += 1
        seen, valid = meter.result(), holdout(model.module, [Path("holdout.txt")], rank, world)
        if rank == 0:
            print(f"epoch {epoch} steps {steps} train {seen} holdout {valid}", flush=True)
            torch.save({"model": model.module.state_dict(), "steps": steps, "epoch": epoch}, "multitask.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
