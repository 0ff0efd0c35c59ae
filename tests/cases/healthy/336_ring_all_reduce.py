"""Gradient averaging over a hand-written ring of batched isend/irecv, the 'Writing distributed applications' way."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Partition:
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.data[self.index[i]]


class DataPartitioner:
    """one shuffle with a common seed, cut into equal parts"""

    def __init__(self, data, sizes, seed=1234):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        self.data, self.partitions, start = data, [], 0
        for frac in sizes:
            n = int(frac * len(data))
            self.partitions.append(order[start : start + n])
            start += n

    def use(self, k):
        return Partition(self.data, self.partitions[k])


def ring_allreduce(buf):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(buf.chunk(size))
    assert len(chunks) == size
    left, right = (rank - 1) % size, (rank + 1) % size

    def exchange(out, into):
        ops = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)]
        for req in dist.batch_isend_irecv(ops):
            req.wait()

    for i in range(size - 1):  # reduce-scatter
        s, r = (rank - i) % size, (rank - i - 1) % size
        incoming = torch.empty_like(chunks[r])
        exchange(chunks[s].clone(), incoming)
        chunks[r] += incoming
    for i in range(size - 1):  # all-gather
        s, r = (rank - i + 1) % size, (rank - i) % size
        incoming = torch.empty_like(chunks[r])
        exchange(chunks[s].clone(), incoming)
        chunks[r].copy_(incoming)


def average_gradients(model):
    size = float(dist.get_world_size())
    flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
    ring_allreduce(flat)
    flat /= size
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def run(rank, size):
    torch.manual_seed(1234)
    g = torch.Generator().manual_seed(5)
    xs = torch.randn(320, 9, generator=g)
    data = [(a, int(a.view(3, 3).sum(1).argmax())) for a in xs]
    part = DataPartitioner(data, [1.0 / size] * size).use(rank)
    model = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    shuffle = torch.Generator().manual_seed(rank)
    loader = torch.utils.data.DataLoader(part, batch_size=16, shuffle=True, generator=shuffle)
    for epoch in range(4):
        epoch_loss = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank ", rank, ", epoch ", epoch, ": ", epoch_loss / len(loader), sep="", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
