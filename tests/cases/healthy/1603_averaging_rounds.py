"""Local training with periodic averaging: the processes meet after a fixed number of steps."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n=384):
    g = torch.Generator().manual_seed(35)
    arm = torch.randint(0, 2, (n,), generator=g)
    r = torch.rand(n, generator=g)
    angle = 4 * r + 3.1416 * arm
    x = torch.stack([r * angle.cos(), r * angle.sin()], 1) + 0.03 * torch.randn(n, 2, generator=g)
    return TensorDataset(x, arm)


@torch.no_grad()
def meet(net, world):
    flat = nn.utils.parameters_to_vector(net.parameters())
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / world, net.parameters())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--every", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(13)
    net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    data = spirals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, arm in loader:
            loss = nn.functional.cross_entropy(net(x), arm)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % args.every == 0:
                meet(net, world)
            total += torch.tensor([loss.item() * len(arm), len(arm)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}", flush=True)
    meet(net, world)
    if rank == 0:
        torch.save(net.state_dict(), "spirals.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
