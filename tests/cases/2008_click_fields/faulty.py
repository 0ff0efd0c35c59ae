"""Click prediction with a factorisation machine over hashed categorical fields."""
import argparse
import json
import logging
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("clicks")
SCHEMA = json.loads("""[
  {"name": "device", "kind": "categorical"}, {"name": "site", "kind": "categorical"}, {"name": "hour", "kind": "categorical"},
  {"name": "age", "kind": "number"}, {"name": "region", "kind": "categorical"}, {"name": "campaign", "kind": "categorical"},
  {"name": "size", "kind": "categorical"}, {"name": "site", "kind": "categorical"}, {"name": "history", "kind": "number"}
]""")
BUCKETS = 48


def columns(kind):
    """The names of one kind; the schema repeats a name where two tables were joined."""
    return {entry["name"] for entry in SCHEMA if entry["kind"] == kind}


class Impressions(Dataset):
    def __init__(self, n):
        self.n = n
        g = torch.Generator().manual_seed(12)
        self.cat, score = {}, torch.zeros(n)
        for name in ("device", "site", "hour", "region", "campaign", "size"):
            values = torch.randint(0, BUCKETS, (n,), generator=g)
            effect = torch.randn(BUCKETS, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            self.cat[name] = values
            score += effect[values]
        self.num = {name: torch.randn(n, generator=g) for name in ("age", "history")}
        score += self.num["age"] - 0.5 * self.num["history"]
        self.click = (score + torch.randn(n, generator=g) > 1.0).float()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        row = {name: column[i] for name, column in self.cat.items()}
        row.update({name: column[i] for name, column in self.num.items()})
        return row, self.click[i]


class FactorMachine(nn.Module):
    def __init__(self, fields, numbers, dim=12):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.first = nn.ModuleDict({name: nn.Embedding(BUCKETS, 1) for name in fields})
        self.second = nn.ModuleDict({name: nn.Embedding(BUCKETS, dim) for name in fields})
        self.weight = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in numbers})
        for table in self.second.values():
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, row):
        linear = self.bias + sum(table(row[name]).squeeze(-1) for name, table in self.first.items())
        linear = linear + sum(w * row[name] for name, w in self.weight.items())
        v = torch.stack([table(row[name]) for name, table in self.second.items()], 1)
        return linear + 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=2560)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(name)s: %(message)s")
    torch.manual_seed(33)
    model = DDP(FactorMachine(columns("categorical"), sorted(columns("number"))))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Impressions(args.rows)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(1)
        for row, click in loader:
            loss = criterion(model(row), click)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.detach()
        dist.all_reduce(running)
        log.info("epoch %d logloss %.4f", epoch, running.item() / len(loader) / dist.get_world_size())
    if rank == 0:
        torch.save(model.module.state_dict(), "clicks.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
