"""Streaming dataset split over processes and loader workers."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, total, rank, world):
        self.total, self.rank, self.world, self.epoch = total, rank, world, 0

    def record(self, key):
        g = torch.Generator().manual_seed(key)
        x = torch.randn(14, generator=g)
        return x, (x[:7].sum() > x[7:].sum()).long()

    def __iter__(self):
        info = get_worker_info()
        n_workers, worker = (info.num_workers, info.id) if info else (1, 0)
        shard, shards = self.rank * n_workers + worker, self.world * n_workers
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for key in order[shard::shards]:
            yield self.record(key)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(14, 32), nn.GELU(), nn.Linear(32, 2)))
    opt = torch.optim.NAdam(net.parameters(), lr=3e-3)
    stream = Stream(640, rank, world)
    loader = DataLoader(stream, batch_size=16, num_workers=2)
    for epoch in range(4):
        stream.epoch = epoch
        hits = torch.zeros(2)
        for x, y in loader:
            out = net(x)
            opt.zero_grad()
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
            hits += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: {hits[0].item() / hits[1].item():.3f} of {int(hits[1])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
