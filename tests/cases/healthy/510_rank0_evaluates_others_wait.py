"""Validation on the main process; the others wait."""
import contextlib
import csv
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@contextlib.contextmanager
def main_process_first():
    """rank 0 runs the body, then everybody goes on"""
    try:
        yield dist.get_rank() == 0
    finally:
        dist.barrier()


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    t = torch.rand(n, generator=g) * 4
    a = t + y * 3.1416
    x = torch.stack([t * a.cos(), t * a.sin()], 1) / 4 + 0.03 * torch.randn(n, 2, generator=g)
    return x, y


class History:
    def __init__(self, path):
        self.path, self.rows = path, []

    def add(self, **row):
        self.rows.append(row)
        with open(self.path, "w", newline="") as f:
            w = csv.DictWriter(f, fieldnames=list(row))
            w.writeheader()
            w.writerows(self.rows)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    history = History("history.csv") if rank == 0 else None
    best = 0.0
    for step in range(1, 61):
        x, y = spirals(64, seed=1000 * rank + step)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 0:
            with main_process_first() as mine:
                if mine:
                    net.eval()
                    with torch.no_grad():
                        vx, vy = spirals(2000, seed=5)
                        accuracy = (net(vx).argmax(1) == vy).float().mean().item()
                    net.train()
                    history.add(step=step, accuracy=f"{accuracy:.4f}")
                    if accuracy > best:
                        best = accuracy
                        torch.save(net.state_dict(), "best.pt")
                    print(f"step {step}: validation accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
