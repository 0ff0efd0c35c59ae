"""Physics-informed network for -u'' = f on [0, 1]: collocation points are split over the ranks, L-BFGS fits the weights."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn


def build_net(width):
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).double()


def exact(x):
    return torch.sin(math.pi * x) + 0.3 * torch.sin(4 * math.pi * x)


def source(x):
    return math.pi**2 * torch.sin(math.pi * x) + 0.3 * (4 * math.pi) ** 2 * torch.sin(4 * math.pi * x)


def solution(net, x):
    return x * (1 - x) * net(x)


def residual_loss(net, x):
    u = solution(net, x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return (ddu + source(x)).pow(2).mean()


def mean_over_ranks(tensor):
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


def average_gradients(net):
    flat = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    mean_over_ranks(flat)
    offset = 0
    for p in net.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def my_points(total, rank, world, seed):
    g = torch.Generator().manual_seed(seed)
    points = torch.rand(total, 1, generator=g, dtype=torch.float64)
    per_rank = total // world
    return points[rank * per_rank : (rank + 1) * per_rank].requires_grad_(True)


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--points", type=int, default=128)
    ap.add_argument("--width", type=int, default=24)
    ap.add_argument("--warmup", type=int, default=30)
    ap.add_argument("--rounds", type=int, default=30)
    ap.add_argument("--iters", type=int, default=8)
    ap.add_argument("--seed", type=int, default=2)
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = build_net(args.width)
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    x = my_points(args.points, rank, world, args.seed)

    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(args.warmup):
        adam.zero_grad()
        residual_loss(net, x).backward()
        average_gradients(net)
        adam.step()

    lbfgs = torch.optim.LBFGS(
        net.parameters(), lr=1.0, max_iter=args.iters, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure():
        lbfgs.zero_grad()
        loss = residual_loss(net, x)
        loss.backward()
        average_gradients(net)
        return mean_over_ranks(loss.detach().clone())

    for round_ in range(args.rounds):
        lbfgs.step(closure)
        if round_ % 5 == 4:
            loss = mean_over_ranks(residual_loss(net, x).detach().clone())
            if rank == 0:
                print(f"round {round_}: residual {loss.item():.4e}", flush=True)

    grid = torch.linspace(0, 1, 101, dtype=torch.float64).unsqueeze(1)
    with torch.no_grad():
        error = (solution(net, grid) - exact(grid)).abs().max()
    if rank == 0:
        print(f"largest error {error.item():.4e}")
        torch.save(net.state_dict(), "pinn.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
