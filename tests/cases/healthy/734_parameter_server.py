"""Asynchronous parameter server: rank 0 holds the weights and serves whoever asks; the workers pull, compute a gradient, push."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

PULL, PUSH, DONE = 0, 1, 2


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


def friedman(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 10, generator=g)
    y = torch.sin(3.14 * x[:, 0] * x[:, 1]) + 2 * (x[:, 2] - 0.5) ** 2 + x[:, 3] + 0.5 * x[:, 4]
    return x, y[:, None]


def server(world):
    net = make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    size = parameters_to_vector(net.parameters()).numel()
    grad, tag = torch.zeros(size), torch.zeros(1, dtype=torch.long)
    xt, yt = friedman(300, 99)
    alive, updates, served = world - 1, 0, {r: 0 for r in range(1, world)}
    while alive:
        src = dist.recv(tag)
        if tag.item() == PULL:
            dist.send(parameters_to_vector(net.parameters()).detach(), dst=src)
        elif tag.item() == PUSH:
            dist.recv(grad, src=src)
            offset = 0
            for p in net.parameters():
                p.grad = grad[offset : offset + p.numel()].view_as(p).clone()
                offset += p.numel()
            opt.step()
            updates += 1
            served[src] += 1
            if updates % 40 == 0:
                with torch.no_grad():
                    print(f"[server] {updates} updates, test mse {nn.functional.mse_loss(net(xt), yt).item():.4f}, by worker {served}", flush=True)
        else:
            alive -= 1
    torch.save(net.state_dict(), f"/tmp/ps_{os.getpid()}.pt")


def worker(rank, world, steps):
    net = make_net()
    x, y = friedman(600, 1)
    x, y = x[rank - 1 :: world - 1], y[rank - 1 :: world - 1]
    g = torch.Generator().manual_seed(rank)
    weights = parameters_to_vector(net.parameters()).detach().clone()
    for step in range(steps):
        dist.send(torch.tensor([PULL]), dst=0)
        dist.recv(weights, src=0)
        with torch.no_grad():
            vector_to_parameters(weights.clone(), net.parameters())
        idx = torch.randint(0, len(x), (20,), generator=g)
        loss = nn.functional.mse_loss(net(x[idx]), y[idx])
        grads = torch.autograd.grad(loss, list(net.parameters()))
        dist.send(torch.tensor([PUSH]), dst=0)
        dist.send(torch.cat([v.flatten() for v in grads]), dst=0)
        if rank == 2:
            time.sleep(0.002)  # a slow machine
    dist.send(torch.tensor([DONE]), dst=0)
    print(f"[worker {rank}] finished, last loss {loss.item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        server(world)
    else:
        worker(rank, world, 90)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
