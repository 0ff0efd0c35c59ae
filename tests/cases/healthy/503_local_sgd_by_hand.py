"""Local SGD: K local steps, then the parameters are averaged."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def average(tensors):
    world = dist.get_world_size()
    for t in tensors:
        dist.all_reduce(t)
        t /= world


def momenta(opt):
    return [s["momentum_buffer"] for s in opt.state.values()]


def task(gen, n):
    x = torch.rand(n, 4, generator=gen) * 2 - 1
    return x, (x[:, :1] * x[:, 1:2] - x[:, 2:3] * x[:, 3:])


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=9)
    ap.add_argument("--local-steps", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 1))
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    gen = torch.Generator().manual_seed(10 + rank)
    for r in range(args.rounds):
        for _ in range(args.local_steps):
            x, y = task(gen, 32)
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        average([p.data for p in net.parameters()])
        average(momenta(opt))
        shown = [loss.detach().clone()]
        average(shown)
        if rank == 0:
            print(f"round {r}: loss {shown[0].item():.4f}")
    if rank == 0:
        torch.save(net.state_dict(), "averaged.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
