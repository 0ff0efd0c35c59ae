"""Synchronous SGD with an own ring all-reduce over point-to-point messages."""
import os
from math import ceil

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Partition:
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def batches(self, size, generator):
        order = torch.randperm(len(self.index), generator=generator).tolist()
        for i in range(0, len(order), size):
            rows = [self.index[j] for j in order[i:i + size]]
            yield self.data[0][rows], self.data[1][rows]


def partition(data, parts, seed=1234):
    """Divide the rows among the processes, in the same way everywhere."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data[0]), generator=g).tolist()
    part = len(order) // parts
    return [Partition(data, order[i * part:(i + 1) * part]) for i in range(parts)]


def digits(n=360):
    """7-segment digits with noise."""
    segs = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]
    table = torch.tensor([[float(c) for c in s] for s in segs])
    g = torch.Generator().manual_seed(7)
    y = torch.randint(0, 10, (n,), generator=g)
    return table[y] + 0.3 * torch.randn(n, 7, generator=g), y


def ring_all_reduce(send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buff = send.clone()
    recv_buff = torch.zeros_like(send)
    accum = send.clone()
    left, right = (rank - 1) % size, (rank + 1) % size
    for i in range(size - 1):
        if i % 2 == 0:
            send_req = dist.isend(send_buff, right)
            dist.recv(recv_buff, left)
            accum[:] += recv[:]
        else:
            send_req = dist.isend(recv_buff, right)
            dist.recv(send_buff, left)
            accum[:] += recv[:]
        send_req.wait()
    recv[:] = accum[:]


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        total = torch.zeros_like(param.grad)
        ring_all_reduce(param.grad, total)
        param.grad.copy_(total / size)


def run(rank, size):
    torch.manual_seed(1234)
    data = digits()
    mine = partition(data, size)[rank]
    bsz = 60 // size
    model = nn.Sequential(nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    shuffle = torch.Generator().manual_seed(100 + rank)
    num_batches = ceil(len(mine) / bsz)
    for epoch in range(4):
        epoch_loss = 0.0
        for x, y in mine.batches(bsz, shuffle):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        mean = torch.tensor(epoch_loss / num_batches)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: {mean.item() / size:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.barrier()
    dist.destroy_process_group()
