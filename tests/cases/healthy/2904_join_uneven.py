"""Sites with unequal amounts of data train one model; DDP and the sharded optimizer share a Join context."""
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

SITE_ROWS = (1100, 740)
DIM = 18


class Survival(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def site(index, rows):
    g = torch.Generator().manual_seed(100 + index)
    w = torch.randn(DIM, generator=torch.Generator().manual_seed(1))
    x = torch.randn(rows, DIM, generator=g) + 0.3 * index
    hazard = torch.exp(0.4 * (x @ w) / DIM**0.5)
    t = -torch.log(torch.rand(rows, generator=g)) / hazard
    seen = (torch.rand(rows, generator=g) < 0.8).float()
    return TensorDataset(x, t, seen)


def nll(log_h, t, seen):
    return (torch.exp(log_h) * t - seen * log_h).mean()


@torch.no_grad()
def held_out(model, rank, world):
    x, t, seen = site(rank, 300 + 1200).tensors
    x, t, seen = x[-300:], t[-300:], seen[-300:]
    s = torch.tensor([nll(model(x), t, seen).item() * len(x), len(x)], dtype=torch.float64)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), dist.get_world_size()
    log = logging.getLogger("site%d" % rank)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    torch.manual_seed(0)
    model = DDP(Survival())
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=2e-3, weight_decay=1e-3)
    gen = torch.Generator().manual_seed(rank)
    data = site(rank, SITE_ROWS[rank % len(SITE_ROWS)])
    loader = DataLoader(data, batch_size=20, shuffle=True, generator=gen)
    for epoch in range(5):
        total, n = 0.0, 0
        with Join([model, opt]):
            for x, t, seen in loader:
                loss = nll(model(x), t, seen)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item() * len(x)
                n += len(x)
        log.info("epoch %d: %d batches, local nll %.4f", epoch, len(loader), total / n)
        both = torch.tensor([total, float(n)], dtype=torch.float64)
        dist.all_reduce(both)
        score = held_out(model.module, rank, world)
        if rank == 0:
            log.info("epoch %d: all sites nll %.4f, held out %.4f", epoch, (both[0] / both[1]).item(), score)
    opt.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()}, "survival.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
