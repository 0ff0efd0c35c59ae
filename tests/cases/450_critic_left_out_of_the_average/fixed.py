"""Actor-critic in the style of Spinning Up, with torch.distributed in place of MPI."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


def mlp(sizes):
    layers = []
    for i, o in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sync_params(module):
    for p in module.parameters():
        dist.broadcast(p.data, 0)


def avg_grads(module):
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, g in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()])):
        p.grad.copy_(g.view_as(p))


def collect(pi, rng, n):
    """one-step target tracking: state is (position, target), reward the negative distance"""
    s = torch.from_numpy(rng.uniform(-1, 1, (n, 2)).astype(np.float32))
    with torch.no_grad():
        dist_ = torch.distributions.Normal(pi(s), 0.3)
        a = dist_.mean + 0.3 * torch.from_numpy(rng.standard_normal((n, 1)).astype(np.float32))
    r = -(s[:, :1] + a - s[:, 1:]).abs().squeeze(1)
    return s, a, r


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    pi, v = mlp([2, 32, 1]), mlp([2, 32, 1])
    sync_params(pi)
    sync_params(v)
    pi_opt = torch.optim.Adam(pi.parameters(), lr=1e-2)
    v_opt = torch.optim.Adam(v.parameters(), lr=1e-2)
    rng = np.random.default_rng(500 + rank)

    for epoch in range(20):
        s, a, r = collect(pi, rng, 128)
        with torch.no_grad():
            adv = r - v(s).squeeze(1)
        logp = torch.distributions.Normal(pi(s), 0.3).log_prob(a).squeeze(1)
        loss_pi = -(logp * adv).mean()
        pi_opt.zero_grad()
        loss_pi.backward()
        avg_grads(pi)
        pi_opt.step()
        for _ in range(3):
            loss_v = ((v(s).squeeze(1) - r) ** 2).mean()
            v_opt.zero_grad()
            loss_v.backward()
            avg_grads(v)
            v_opt.step()
        stats = torch.tensor([r.mean().item(), loss_v.item()])
        dist.all_reduce(stats)
        if rank == 0 and epoch % 5 == 4:
            print("epoch {} return {:.4f} value loss {:.4f}".format(epoch + 1, *(stats / world).tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
