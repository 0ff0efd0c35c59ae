"""Local SGD: every process trains its own replica, parameters are averaged every few steps and at the end."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    rows: int = 1024
    batch: int = 16
    epochs: int = 4
    period: int = 6
    lr: float = 0.05
    seed: int = 67


def wave_table(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 3, generator=g) - 2
    y = (2 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(x, y)


@torch.no_grad()
def average_parameters(model):
    flat = nn.utils.parameters_to_vector(model.parameters())
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), model.parameters())


class Replica:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(cfg.seed)
        self.model = nn.Sequential(
            nn.Linear(3, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        torch.manual_seed(cfg.seed + 1 + dist.get_rank())  # dropout masks of its own
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cfg.lr)
        self.steps = 0

    def step(self, x, y):
        self.model.train()
        loss = nn.functional.mse_loss(self.model(x).squeeze(1), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.cfg.period == 0:
            average_parameters(self.model)
        return loss.item()

    @torch.no_grad()
    def error(self, data):
        self.model.eval()
        rank, world = dist.get_rank(), dist.get_world_size()
        x, y = data.tensors
        err = (self.model(x[rank::world]).squeeze(1) - y[rank::world]).pow(2)
        both = torch.tensor([err.sum().item(), float(len(err))])
        dist.all_reduce(both)
        return (both[0] / both[1]).item()


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    train, test = wave_table(cfg.rows, 1), wave_table(256, 2)
    replica = Replica(cfg)
    sampler = DistributedSampler(train, seed=cfg.seed)
    loader = DataLoader(train, batch_size=cfg.batch, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            total += torch.tensor([replica.step(x, y), 1.0])
        dist.all_reduce(total)
        average_parameters(replica.model)  # the epoch need not end on a multiple of the period
        mse = replica.error(test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train {total[0] / total[1]:.4f} test {mse:.4f}", flush=True)
    if dist.get_rank() == 0:
        torch.save(replica.model.state_dict(), "replica.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
