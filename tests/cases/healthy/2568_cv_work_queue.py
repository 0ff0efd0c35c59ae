"""Cross-validated hyper-parameter search: processes take (setting, fold) jobs from a counter in the store."""
import itertools
import json
import os
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

FOLDS = 4
GRID = {"lr": (0.003, 0.03), "width": (16, 48), "weight_decay": (0.0, 0.02)}


def wine(n=720):
    g = torch.Generator().manual_seed(18)
    x = torch.randn(n, 11, generator=g)
    a = x[:, 0] - 0.8 * x[:, 3] + x[:, 5] * x[:, 6]
    b = x[:, 1] + x[:, 2].abs() - 0.7
    y = (a > 0).long() + (b > 0).long()
    flip = torch.rand(n, generator=g) < 0.08
    y[flip] = torch.randint(0, 3, (int(flip.sum()),), generator=g)
    return x, y


def folds(n):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(7))
    return order.chunk(FOLDS)


def standardise(train, other):
    mean, std = train.mean(0), train.std(0)
    return (train - mean) / std, (other - mean) / std


def run_job(setting, fold, x, y):
    parts = folds(len(y))
    val = parts[fold]
    train = torch.cat([p for i, p in enumerate(parts) if i != fold])
    xt, xv = standardise(x[train], x[val])
    torch.manual_seed(fold)
    net = nn.Sequential(nn.Linear(11, setting["width"]), nn.ReLU(), nn.Linear(setting["width"], 3))
    opt = torch.optim.AdamW(net.parameters(), lr=setting["lr"], weight_decay=setting["weight_decay"])
    g = torch.Generator().manual_seed(fold)
    for _ in range(12):
        for idx in torch.randperm(len(train), generator=g).split(32):
            loss = nn.functional.cross_entropy(net(xt[idx]), y[train][idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
    with torch.no_grad():
        return (net(xv).argmax(1) == y[val]).float().mean().item()


def refit(setting, x, y):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(11, setting["width"]), nn.ReLU(), nn.Linear(setting["width"], 3))
    opt = torch.optim.AdamW(net.parameters(), lr=setting["lr"], weight_decay=setting["weight_decay"])
    xs, _ = standardise(x, x)
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        for idx in torch.randperm(len(y), generator=g).split(32):
            loss = nn.functional.cross_entropy(net(xs[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return net, loss.item()


@record
def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    port = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast_object_list(port, src=0)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)

    x, y = wine()
    settings = [dict(zip(GRID, values)) for values in itertools.product(*GRID.values())]
    jobs = list(itertools.product(range(len(settings)), range(FOLDS)))
    done = []
    while (ticket := store.add("next_job", 1)) <= len(jobs):
        s, fold = jobs[ticket - 1]
        done.append((s, fold, run_job(settings[s], fold, x, y)))
    print(f"process {rank} (pid {os.getpid()}) did {len(done)} of {len(jobs)} jobs", flush=True)

    gathered = [None] * world if rank == 0 else None
    dist.gather_object(done, gathered, dst=0)
    if rank == 0:
        table = defaultdict(list)
        for s, _, acc in itertools.chain.from_iterable(gathered):
            table[s].append(acc)
        assert all(len(v) == FOLDS for v in table.values())
        ranking = sorted(((sum(v) / FOLDS, s) for s, v in table.items()), reverse=True)
        for acc, s in ranking[:3]:
            print(f"{acc:.3f} {json.dumps(settings[s])}", flush=True)
        net, last = refit(settings[ranking[0][1]], x, y)
        torch.save(net.state_dict(), "best_setting.pt")
        print(f"refitted on everything, last loss {last:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
