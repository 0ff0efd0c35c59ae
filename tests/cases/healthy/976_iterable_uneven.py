"""Streams of unequal length: ranks agree before each step; whoever has run dry takes part with a loss of weight zero."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Events(IterableDataset):
    """Files of unequal size, dealt to (rank, worker) by their number; records of a file are made on the fly."""

    def __init__(self, rank, world, files=11):
        self.rank, self.world, self.files, self.epoch = rank, world, files, 0

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        g = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.files, generator=g).tolist()
        for number in order[self.rank * workers + worker :: self.world * workers]:
            records = torch.Generator().manual_seed(5000 + number)
            for _ in range(20 + 9 * (number % 4)):
                x = torch.randn(7, generator=records)
                yield x, x[0] * x[1] + x[2]


def rounds(loader):
    """Yields this rank's batch, or None once it has run dry, until all have."""
    stream = iter(loader)
    while True:
        batch = next(stream, None)
        alive = torch.tensor([float(batch is not None), float(len(batch[0]) if batch is not None else 0)])
        dist.all_reduce(alive)
        if alive[0] == 0:
            return
        yield batch, alive[1].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = DDP(nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    stream = Events(rank, world)
    loader = DataLoader(stream, batch_size=16, num_workers=2)  # not persistent: the workers see the new epoch
    for epoch in range(4):
        stream.epoch = epoch
        steps = idle = 0
        seen = torch.zeros(2)
        for batch, total in rounds(loader):
            if batch is None:
                loss = model(torch.zeros(1, 7)).sum() * 0.0
                idle += 1
            else:
                x, y = batch
                err = F.mse_loss(model(x).squeeze(1), y, reduction="sum")
                loss = err * world / total  # DDP divides by the world; the global mean is wanted
                seen += torch.tensor([err.item(), len(y)])
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
        dist.all_reduce(seen)
        waits = [None] * world
        dist.all_gather_object(waits, idle)
        if rank == 0:
            print(f"epoch {epoch}: mse {(seen[0] / seen[1]).item():.4f}, {int(seen[1])} records, {steps} steps, idle {waits}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
