"""Asynchronous parameter server on send/recv: rank 0 keeps weights and optimizer and serves whoever comes first."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS = 40
PUSH, WEIGHTS, BYE = 1, 2, 3


def make_net():
    torch.manual_seed(123)
    return nn.Sequential(nn.Linear(15, 40), nn.ReLU(), nn.Linear(40, 2))


def shard(index, workers):
    g = torch.Generator().manual_seed(40)
    x = torch.randn(600, 15, generator=g)
    y = (x[:, 0] - x[:, 1] + 0.2 * torch.randn(600, generator=g) > 0).long()
    return x[index::workers], y[index::workers]


def serve(workers):
    net = make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    size = parameters_to_vector(net.parameters()).numel()
    message = torch.zeros(size + 3)  # kind, version the worker had, loss, gradient
    version, alive, staleness, losses = 0, workers, [], []
    while alive:
        source = dist.recv(message)  # from any worker
        kind = int(message[0])
        if kind == BYE:
            alive -= 1
            continue
        staleness.append(version - int(message[1]))
        losses.append(message[2].item())
        offset = 3
        for p in net.parameters():
            p.grad = message[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        opt.step()
        version += 1
        reply = torch.cat([torch.tensor([float(version)]), parameters_to_vector(net.parameters()).detach()])
        dist.send(reply, source)
        if version % 20 == 0:
            print(f"update {version}: loss {sum(losses[-20:]) / 20:.4f}, mean staleness {sum(staleness[-20:]) / 20:.2f}")
    x, y = shard(0, 1)
    with torch.no_grad():
        print(f"served {version} updates, accuracy {(net(x).argmax(1) == y).float().mean().item():.3f}")


def work(rank, workers):
    net = make_net()  # the same seed as on the server: version 0 is known without sending it
    x, y = shard(rank - 1, workers)
    g = torch.Generator().manual_seed(rank)
    version = 0
    reply = torch.zeros(parameters_to_vector(net.parameters()).numel() + 1)
    for step in range(STEPS):
        pick = torch.randint(0, len(x), (24,), generator=g)
        loss = F.cross_entropy(net(x[pick]), y[pick])
        net.zero_grad()
        loss.backward()
        grad = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
        dist.send(torch.cat([torch.tensor([float(PUSH), float(version), loss.item()]), grad]), 0)
        dist.recv(reply, 0)
        version = int(reply[0])
        vector_to_parameters(reply[1:].clone(), net.parameters())
    bye = torch.zeros(reply.numel() + 2)
    bye[0] = BYE
    dist.send(bye, 0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        serve(world - 1)
    else:
        work(rank, world - 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
