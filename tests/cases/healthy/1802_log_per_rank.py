"""Each process keeps a log file of its own; rank 0 also keeps the summary."""
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_logger(rank):
    os.makedirs("logs", exist_ok=True)
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler(f"logs/rank{rank}.log", mode="w")
    handler.setFormatter(logging.Formatter(f"[{rank}] %(asctime)s %(message)s"))
    logger.addHandler(handler)
    if rank == 0:
        logger.addHandler(logging.StreamHandler())
    return logger


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    log = make_logger(rank)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(256, 9, generator=g)
    data = TensorDataset(x, x.sort(dim=1).values[:, 4:5])
    model = DDP(nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for i, (a, b) in enumerate(loader):
            loss = nn.functional.mse_loss(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 4 == 0:
                log.info("epoch %d step %d local loss %.5f", epoch, i, loss.item())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            with open("logs/summary.txt", "a") as f:
                f.write(f"{epoch} {mean.item() / dist.get_world_size():.5f}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
