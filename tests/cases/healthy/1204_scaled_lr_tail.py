"""Gradient accumulation with an incomplete last group, linear lr scaling and warm-up."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(n=416):
    g = torch.Generator().manual_seed(35)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, :5].norm(dim=1) > x[:, 5:].norm(dim=1)).long())


def main(accum=4, base_lr=0.02, warmup=8, epochs=6):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 2)))
    torch.manual_seed(1000 + rank)  # different dropout masks per process
    opt = torch.optim.SGD(model.parameters(), lr=base_lr * world, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / warmup))
    train = data()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)  # 26 micro batches: six groups and a rest of two
    n = len(loader)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for i, (x, y) in enumerate(loader):
            group = min(accum, n - i // accum * accum)
            last = (i + 1) % accum == 0 or i + 1 == n
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / group).backward()
            if last:
                opt.step()
                opt.zero_grad()
                sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world / n:.4f}, lr {sched.get_last_lr()[0]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
