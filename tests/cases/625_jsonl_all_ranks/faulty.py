"""Poisson regression of counts with a structured metrics log."""
import json
import logging
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

OUT = pathlib.Path("poisson_run")


class MetricLog:
    """Console for people, JSON lines for plots."""

    def __init__(self, rank):
        self.console = logging.getLogger("train")
        self.console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
        self.console.addHandler(logging.StreamHandler())
        OUT.mkdir(exist_ok=True)
        self.file = open(OUT / "metrics.jsonl", "a", buffering=1)

    def write(self, step, **values):
        self.console.info("step %d %s", step, " ".join(f"{k}={v:.4f}" for k, v in values.items()))
        if self.file:
            self.file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self):
        if self.file:
            self.file.close()


def counts(n=320):
    g = torch.Generator().manual_seed(29)
    x = torch.randn(n, 6, generator=g)
    rate = (0.5 * x[:, 0] - 0.3 * x[:, 1] * x[:, 2] + 0.4).exp()
    return TensorDataset(x, torch.poisson(rate, generator=g))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    log = MetricLog(rank)
    data = counts()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.Softplus(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nll = nn.functional.poisson_nll_loss(model(x).squeeze(1), y)
            opt.zero_grad()
            nll.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            step += 1
            if step % 10 == 0:
                mean = nll.detach().clone()
                dist.all_reduce(mean)
                log.write(step, nll=mean.item() / world, grad_norm=norm.item())
    log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
