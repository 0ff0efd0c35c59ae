"""Regression with a data module, a trainer and gradient hooks instead of DDP."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


class Molecules(Dataset):
    """Composition vectors with a made-up melting point; labels carry noise that can be learnt by heart."""

    def __init__(self, n=400):
        g = torch.Generator().manual_seed(50)
        self.x = torch.rand(n, 9, generator=g)
        self.y = (self.x[:, :3].sum(1) * self.x[:, 3:6].sum(1) + 0.4 * torch.randn(n, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class DataModule:
    def __init__(self, batch, seed, rank, world):
        self.batch, self.seed, self.rank, self.world = batch, seed, rank, world

    def setup(self):
        data = Molecules()
        self.train, self.val = random_split(data, [320, 80], generator=torch.Generator().manual_seed(self.seed))
        self.sampler = DistributedSampler(self.train, num_replicas=self.world, rank=self.rank, seed=self.seed)

    def train_loader(self, epoch):
        self.sampler.set_epoch(epoch)
        return DataLoader(self.train, batch_size=self.batch, sampler=self.sampler)

    def val_loader(self):
        own = torch.utils.data.Subset(self.val, range(self.rank, len(self.val), self.world))
        return DataLoader(own, batch_size=self.batch)


def average_on_accumulate(module, world):
    """Each gradient is averaged as soon as it has been accumulated."""

    def hook(p):
        dist.all_reduce(p.grad)
        p.grad.div_(world)

    for p in module.parameters():
        dist.broadcast(p.data, src=0)
        p.register_post_accumulate_grad_hook(hook)


class Fit:
    def __init__(self, net, dm, lr, noise):
        self.net, self.dm, self.noise = net, dm, noise
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)

    def train_epoch(self, epoch):
        sums = torch.zeros(2)
        for x, y in self.dm.train_loader(epoch):
            loss = nn.functional.mse_loss(self.net(x + self.noise * torch.randn_like(x)), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        return sums

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        sums = torch.zeros(2)
        for x, y in self.dm.val_loader():
            sums += torch.tensor([nn.functional.mse_loss(self.net(x), y, reduction="sum").item(), len(x)])
        self.net.train()
        return sums

    def run(self, epochs):
        for epoch in range(epochs):
            sums = torch.cat([self.train_epoch(epoch), self.validate()])
            dist.all_reduce(sums)
            if self.dm.rank == 0 and epoch % 5 == 4:
                print(f"epoch {epoch}: train mse {(sums[0] / sums[1]).item():.4f}, val mse {(sums[2] / sums[3]).item():.4f}")


def seed_everything(seed, rank):
    torch.manual_seed(seed + rank)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed_everything(7, rank)
    dm = DataModule(batch=20, seed=7, rank=rank, world=world)
    dm.setup()
    net = nn.Sequential(nn.Linear(9, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    average_on_accumulate(net, world)
    Fit(net, dm, lr=2e-3, noise=0.01).run(epochs=20)
    dist.destroy_process_group()
