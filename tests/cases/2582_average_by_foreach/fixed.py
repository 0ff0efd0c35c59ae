"""Three spirals; the trainer keeps an average of the weights beside them."""
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


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


class Trainer:
    def __init__(self, net, model, opt, decay=0.9):
        self.net, self.model, self.opt, self.decay = net, model, opt, decay
        self.params = list(net.parameters())
        self.ema = [p.detach().clone() for p in self.params]
        self.saved = [torch.empty_like(p) for p in self.params]

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.params, 1 - self.decay)
        return loss.detach()

    @torch.no_grad()
    def use_average(self):
        torch._foreach_copy_(self.saved, self.params)
        torch._foreach_copy_(self.params, self.ema)

    @torch.no_grad()
    def use_trained(self):
        torch._foreach_copy_(self.params, self.saved)

    def validate(self, loader):
        self.use_average()
        found = accuracy(self.net, loader)
        self.use_trained()
        return found


def main(epochs=5):
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
    trainer = Trainer(net, model, opt)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        mean = sum(trainer.step(x, y) for x, y in loader) / len(loader)
        dist.all_reduce(mean)
        found = trainer.validate(held_out)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / world:.3f}, averaged weights {found:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
