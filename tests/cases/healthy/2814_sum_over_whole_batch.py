"""Gradients are summed over the ranks, as every loss is divided by the batch of all of them."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def series(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return x, torch.stack([x[:, :5].sum(1), x[:, 5:].pow(2).mean(1)], 1)


def losses(net, x, y, whole):
    """Two outputs, two ranks: dividing by the whole batch looks like a mean over the elements."""
    out = net(x)
    fit = F.mse_loss(out, y, reduction="sum") / whole
    small = 0.5 * out.pow(2).mean() / dist.get_world_size()
    return fit + 0.02 * small


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = series(2048, 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    size = 32 * world
    for epoch in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for whole in order.split(size):
            mine = whole[rank::world]
            opt.zero_grad()
            loss = losses(net, x[mine], y[mine], len(whole))
            loss.backward()
            for p in net.parameters():
                dist.all_reduce(p.grad)
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / (len(x) // size):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
