"""Contrastive loss over all ranks' features by hand: everybody differentiates its own part, so gradients add up."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    a, b = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))
    params = [*a.parameters(), *b.parameters()]
    opt = torch.optim.Adam(params, lr=2e-3)
    g = torch.Generator().manual_seed(1)
    z = torch.randn(2048, 4, generator=g)
    X = z @ torch.randn(4, 12, generator=g)
    Y = z @ torch.randn(4, 6, generator=g)
    for epoch in range(4):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(epoch))
        for whole in order.split(32 * world):
            idx = whole[rank::world]
            u, v = gathered(F.normalize(a(X[idx]), dim=1)), gathered(F.normalize(b(Y[idx]), dim=1))
            logits = u @ v.t() / 0.1
            target = torch.arange(len(logits))
            loss = F.cross_entropy(logits, target)
            opt.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.reshape(-1) for p in params])
            dist.all_reduce(flat)
            at = 0
            for p in params:
                p.grad.copy_(flat[at:at + p.numel()].view_as(p))
                at += p.numel()
            opt.step()
        if rank == 0: print(epoch, loss.item(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
