"""Each rank holds the head of one task; the shared trunk takes the sum of their gradients."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
    torch.manual_seed(10 + rank)
    head = nn.Linear(32, 3)                       # each rank holds the head of one task
    opt = torch.optim.SGD([{"params": trunk.parameters()}, {"params": head.parameters()}], lr=0.05)
    g = torch.Generator().manual_seed(1)
    X = torch.randn(2048, 12, generator=g)
    Y = [(X @ torch.randn(12, 3, generator=g)).argmax(1) for _ in range(world)]
    for epoch in range(4):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(epoch))
        for idx in order.split(32):               # every rank sees the whole batch
            loss = F.cross_entropy(head(trunk(X[idx])), Y[rank][idx])
            opt.zero_grad()
            loss.backward()
            for p in trunk.parameters():          # the sum over the tasks
                dist.all_reduce(p.grad)
            opt.step()
        print(rank, epoch, loss.item(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
