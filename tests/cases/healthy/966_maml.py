"""Second-order MAML on sine waves: inner steps by functional_call, meta-gradients from autograd.grad and averaged by hand."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

net_shape = [(1, 40), (40, 40), (40, 1)]


def make_net():
    layers = []
    for i, o in net_shape:
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Tasks:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def draw(self, shots=10):
        amp = 0.5 + 2 * torch.rand((), generator=self.g)
        phase = math.pi * torch.rand((), generator=self.g)
        x = 10 * torch.rand(2 * shots, 1, generator=self.g) - 5
        y = amp * torch.sin(x + phase)
        return (x[:shots], y[:shots]), (x[shots:], y[shots:])


def adapt(net, params, support, lr, steps, create_graph):
    fast = dict(params)
    for _ in range(steps):
        loss = F.mse_loss(functional_call(net, fast, (support[0],)), support[1])
        grads = torch.autograd.grad(loss, list(fast.values()), create_graph=create_graph)
        fast = {k: v - lr * g for (k, v), g in zip(fast.items(), grads)}
    return fast


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--meta-steps", type=int, default=60)
    ap.add_argument("--tasks", type=int, default=4, help="tasks per rank and meta step")
    ap.add_argument("--inner-lr", type=float, default=0.02)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = make_net()
    params = dict(net.named_parameters())
    opt = torch.optim.Adam(params.values(), lr=3e-3)
    tasks = Tasks(seed=31 * rank + 5)  # an endless stream of tasks, another one on each rank
    holdout = [Tasks(seed=999).draw() for _ in range(1)] + [Tasks(seed=1000 + i).draw() for i in range(7)]

    running = 0.0
    for step in range(1, args.meta_steps + 1):
        meta_loss = 0.0
        for _ in range(args.tasks):
            support, query = tasks.draw()
            fast = adapt(net, params, support, args.inner_lr, 2, create_graph=True)
            meta_loss = meta_loss + F.mse_loss(functional_call(net, fast, (query[0],)), query[1])
        meta_loss = meta_loss / args.tasks
        grads = torch.autograd.grad(meta_loss, list(params.values()))
        flat = torch.cat([g.reshape(-1) for g in grads] + [meta_loss.detach().reshape(1)])  # the loss rides along
        dist.all_reduce(flat)
        flat /= world
        offset = 0
        for p in params.values():
            p.grad = flat[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        opt.step()
        running += flat[-1].item()
        if step % 20 == 0:
            scores = torch.zeros(1)
            for i in range(rank, len(holdout), world):
                support, query = holdout[i]
                fast = adapt(net, params, support, args.inner_lr, 5, create_graph=False)  # needs gradients, although it is an evaluation
                with torch.no_grad():
                    scores += F.mse_loss(functional_call(net, fast, (query[0],)), query[1])
            dist.all_reduce(scores)
            if rank == 0:
                print(f"meta step {step}: query loss {running / 20:.3f}, held-out tasks {scores.item() / len(holdout):.3f}")
            running = 0.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
