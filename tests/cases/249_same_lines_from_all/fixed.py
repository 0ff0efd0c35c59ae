"""Survival-like hazard model with the logging module."""
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup_logging(rank):
    logger = logging.getLogger("hazard")
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    return logger


def intervals(n=352):
    g = torch.Generator().manual_seed(15)
    x = torch.randn(n, 6, generator=g)
    hazard = torch.sigmoid(-1.5 + 0.8 * x[:, 0] - 0.5 * x[:, 1]).unsqueeze(1).expand(n, 8)
    event = (torch.rand(n, 8, generator=g) < hazard).float()
    at_risk = torch.cat([torch.ones(n, 1), (event.cumsum(1)[:, :-1] == 0).float()], 1)
    return TensorDataset(x, event, at_risk)


class Hazard(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, x, event, at_risk):
        bce = nn.functional.binary_cross_entropy_with_logits(self.net(x), event, reduction="none")
        return (bce * at_risk).sum(1).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = setup_logging(rank)
    torch.manual_seed(1)
    model = DDP(Hazard())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    data = intervals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 22, sampler=sampler)
    log.info("%d parameters, %d processes", sum(p.numel() for p in model.parameters()), world)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch in loader:
            opt.zero_grad()
            loss = model(*batch)
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        log.info("epoch %d: nll %.4f", epoch, total.item() / len(loader) / world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
