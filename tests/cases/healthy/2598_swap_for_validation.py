"""Every sixteen steps the averaged weights take the place of the trained ones, and give it back."""
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


class Swap:
    """Exchanges the trained weights with their average while it is entered, without a second copy of the model."""

    def __init__(self, net, decay=0.95):
        self.net, self.decay = net, decay
        self.mean = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def update(self):
        for m, p in zip(self.mean, self.net.parameters()):
            m.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def exchange(self):
        for m, p in zip(self.mean, self.net.parameters()):
            kept = p.detach().clone()
            p.copy_(m)
            m.copy_(kept)

    def __enter__(self):
        self.exchange()
        return self.net

    def __exit__(self, *error):
        self.exchange()


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(epochs=5, every=16):
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
    swap, count = Swap(net), 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            swap.update()
            count += 1
            if count % every == 0:
                with swap as judged:
                    found = accuracy(judged, held_out)
                if rank == 0:
                    print(f"step {count}: {found:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
