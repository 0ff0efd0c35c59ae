"""When the validation loss climbs, training goes back to the average of the weights, at a smaller rate."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + y * 2.0944 + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


def build():
    return nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))


class Shadow:
    def __init__(self, net, decay=0.9):
        self.decay, self.mean = decay, [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def update(self, net):
        for m, p in zip(self.mean, net.parameters()):
            m.lerp_(p, 1 - self.decay)


@torch.no_grad()
def validation(net, loader):
    net.eval()
    sums = torch.zeros(2)
    for x, y in loader:
        sums += torch.stack([F.cross_entropy(net(x), y, reduction="sum"), torch.tensor(float(len(y)))])
    net.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(epochs=10):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = build()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, test = spirals(1024, 1), spirals(512, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    held_out = DataLoader(torch.utils.data.Subset(test, range(rank, len(test), world)), batch_size=128)
    for group in opt.param_groups:
        group["lr"] = 0.08
    shadow, last = Shadow(net), float("inf")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            shadow.update(net)
        now = validation(net, held_out)
        if now > 0.98 * last:
            diverged = [p.detach().clone() for p in net.parameters()]
            with torch.no_grad():
                torch._foreach_copy_(list(net.parameters()), shadow.mean)
            now = validation(net, held_out)
            if now > 1.5 * last:
                with torch.no_grad():
                    torch._foreach_copy_(list(net.parameters()), diverged)
            for group in opt.param_groups:
                group["lr"] *= 0.7
            if rank == 0:
                print(f"epoch {epoch}: back to the average")
        last = now
        if rank == 0:
            print(f"epoch {epoch}: {now:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
