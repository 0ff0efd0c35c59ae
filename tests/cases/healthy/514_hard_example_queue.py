"""Online hard example mining with a bounded priority queue per process."""
import heapq
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class HardQueue:
    def __init__(self, size):
        self.size, self.heap, self.ticket = size, [], itertools.count()

    def offer(self, losses, x, y):
        for value, xi, yi in zip(losses.tolist(), x, y):
            item = (value, next(self.ticket), xi.clone(), yi.clone())
            if len(self.heap) < self.size:
                heapq.heappush(self.heap, item)
            else:
                heapq.heappushpop(self.heap, item)

    def take(self, n):
        taken = heapq.nlargest(n, self.heap)
        gone = {t[1] for t in taken}
        self.heap = [h for h in self.heap if h[1] not in gone]
        heapq.heapify(self.heap)
        return torch.stack([t[2] for t in taken]), torch.stack([t[3] for t in taken])


def main(fresh=24, hard=8):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    g = torch.Generator().manual_seed(6)
    x = torch.rand(720, 2, generator=g) * 2 - 1
    y = ((x * 3).sin().prod(1) > 0).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=fresh, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    queue = HardQueue(size=64)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for xb, yb in loader:
            if len(queue.heap) >= hard:
                hx, hy = queue.take(hard)
            else:
                hx, hy = xb[:hard], yb[:hard]
            xa, ya = torch.cat([xb, hx]), torch.cat([yb, hy])
            out = model(xa)
            each = nn.functional.cross_entropy(out, ya, reduction="none")
            opt.zero_grad()
            each.mean().backward()
            opt.step()
            queue.offer(each.detach()[:fresh], xb, yb)
            stats += torch.tensor([each.detach()[:fresh].sum(), (out[:fresh].argmax(1) == yb).sum(), fresh])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[2]:.4f} accuracy {stats[1] / stats[2]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
