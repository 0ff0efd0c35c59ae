"""Data module + plain loop; settings come from an ini file."""
import configparser
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

INI = """
[trainer]
gpus = 4
epochs = 4
lr = 0.02
[data]
size = 640
batch_size = 16
"""


class Polynomials(Dataset):
    def __init__(self, size):
        g = torch.Generator().manual_seed(0)
        self.coef = torch.randn(size, 4, generator=g)
        self.t = torch.linspace(-1, 1, 12)

    def __len__(self):
        return len(self.coef)

    def __getitem__(self, i):
        c = self.coef[i]
        curve = c[0] + c[1] * self.t + c[2] * self.t**2 + c[3] * self.t**3
        return curve, c


class DataModule:
    def __init__(self, cfg):
        self.cfg = cfg
        self.batch_size = cfg.getint("data", "batch_size")

    def setup(self):
        self.train = Polynomials(self.cfg.getint("data", "size"))

    def sampler_kwargs(self):
        gpus = self.cfg.getint("trainer", "gpus")
        return dict(num_replicas=gpus, rank=int(os.environ["RANK"]) % gpus) if gpus > 1 else None

    def train_dataloader(self):
        kwargs = self.sampler_kwargs()
        if kwargs is None:
            return DataLoader(self.train, self.batch_size, shuffle=True)
        sampler = DistributedSampler(self.train, shuffle=True, drop_last=True, **kwargs)
        return DataLoader(self.train, self.batch_size, sampler=sampler)


def fit(cfg, dm):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4)))
    opt = torch.optim.Adam(model.parameters(), cfg.getfloat("trainer", "lr"))
    loader = dm.train_dataloader()
    for epoch in range(cfg.getint("trainer", "epochs")):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for curve, coef in loader:
            loss = nn.functional.mse_loss(model(curve), coef)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {int(running[1])} batches, mse {(running[0] / running[1]).item():.4f}")


def main():
    cfg = configparser.ConfigParser()
    cfg.read_string(INI)
    dist.init_process_group("gloo")
    dm = DataModule(cfg)
    dm.setup()
    fit(cfg, dm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
