"""A loop with hooks: what happens after backward is a list of callables."""
import os

import torch
import torch.distributed as dist
from torch import nn


class Loop:
    def __init__(self, net, source, steps):
        self.net, self.source, self.steps = net, source, steps
        self.after_backward, self.after_epoch = [], []
        self.loss = None

    def run(self, epochs):
        for self.epoch in range(epochs):
            for x, y in self.source(self.epoch, self.steps):
                self.net.zero_grad()
                self.loss = nn.functional.huber_loss(self.net(x), y)
                self.loss.backward()
                for hook in self.after_backward:
                    hook(self)
            for hook in self.after_epoch:
                hook(self)


class MeanGradients:
    def __init__(self, world):
        self.world = world

    def __call__(self, loop):
        work = [dist.all_reduce(p.grad, async_op=True) for p in loop.net.parameters()]
        for w in work:
            w.wait()
        for p in loop.net.parameters():
            p.grad.mul_(1.0 / self.world)


class Update:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __call__(self, loop):
        self.optimizer.step()


class Report:
    def __call__(self, loop):
        value = loop.loss.detach().clone()
        dist.all_reduce(value)
        if dist.get_rank() == 0:
            print(f"epoch {loop.epoch}: last loss {value.item() / dist.get_world_size():.4f}", flush=True)


def pendulum(rank, batch=32):
    """Every process simulates its own trajectories."""
    def source(epoch, steps):
        g = torch.Generator().manual_seed(100 * epoch + rank)
        for _ in range(steps):
            state = 2 * torch.rand(batch, 2, generator=g) - 1
            nxt = torch.stack([state[:, 0] + 0.1 * state[:, 1], state[:, 1] - 0.1 * torch.sin(3 * state[:, 0])], 1)
            yield state, 10 * (nxt - state)
    return source


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    loop = Loop(net, pendulum(rank), steps=20)
    loop.after_backward = [Update(optimizer), MeanGradients(world)]
    loop.after_epoch = [Report()]
    loop.run(epochs=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
