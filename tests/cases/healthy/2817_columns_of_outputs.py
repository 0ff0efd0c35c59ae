"""Outputs are split over the ranks; the shared trunk takes the sum of what each part asks for."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(12, 32), nn.Tanh())
    full = nn.Linear(32, 8)
    mine = nn.Linear(32, 8 // world)
    with torch.no_grad():
        mine.weight.copy_(full.weight.chunk(world)[rank])
        mine.bias.copy_(full.bias.chunk(world)[rank])
    opt = torch.optim.SGD([*trunk.parameters(), *mine.parameters()], lr=0.02)
    g = torch.Generator().manual_seed(1)
    X = torch.randn(2048, 12, generator=g)
    Y = (X @ torch.randn(12, 8, generator=g)).chunk(world, 1)[rank]
    for epoch in range(4):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(epoch))
        for idx in order.split(32):
            loss = F.mse_loss(mine(trunk(X[idx])), Y[idx], reduction="sum") / len(idx)
            opt.zero_grad()
            loss.backward()
            for p in trunk.parameters():
                dist.all_reduce(p.grad)
            opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0: print(epoch, total.item(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
