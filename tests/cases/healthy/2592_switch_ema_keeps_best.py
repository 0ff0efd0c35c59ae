"""Switch EMA: at the end of each epoch the average becomes the model. The best weights before the switch are kept as well."""
import copy
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
def accuracy(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(epochs=6):
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
    shadow, best, best_state = Shadow(net), -1.0, None
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            shadow.update(net)
        before = accuracy(net, held_out)
        if before > best:
            best, best_state = before, copy.deepcopy(net.state_dict())
        with torch.no_grad():
            for p, m in zip(net.parameters(), shadow.mean):
                p.copy_(m)
        after = accuracy(net, held_out)
        if rank == 0:
            print(f"epoch {epoch}: {before:.3f} before the switch, {after:.3f} behind it")
    net.load_state_dict(best_state)
    if rank == 0:
        torch.save(net.state_dict(), "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
