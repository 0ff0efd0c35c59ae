"""DiLoCo: every worker takes H local AdamW steps, an outer Nesterov step joins the results."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    rounds: int = 8
    inner_steps: int = 10
    inner_lr: float = 3e-3
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    batch: int = 32


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    anchor = [p.detach().clone() for p in model.parameters()]
    outer = torch.optim.SGD(anchor, lr=cfg.outer_lr, momentum=cfg.outer_momentum, nesterov=True)
    inner = torch.optim.AdamW(model.parameters(), lr=cfg.inner_lr)

    g = torch.Generator().manual_seed(12)
    x = torch.randn(1024, 16, generator=g)
    y = (x @ torch.randn(16, 4, generator=g)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    stream = endless(DataLoader(data, cfg.batch, sampler=sampler), sampler)

    for r in range(cfg.rounds):
        losses = []
        for _ in range(cfg.inner_steps):
            xb, yb = next(stream)
            loss = nn.functional.cross_entropy(model(xb), yb)
            inner.zero_grad()
            loss.backward()
            inner.step()
            losses.append(loss.item())

        for a, p in zip(anchor, model.parameters()):
            delta = a - p.detach()
            dist.all_reduce(delta)
            a.grad = delta / world
        outer.step()
        with torch.no_grad():
            for a, p in zip(anchor, model.parameters()):
                p.copy_(a)

        report = torch.tensor(losses).mean()
        dist.all_reduce(report)
        if rank == 0:
            print(f"round {r}: inner loss {report.item() / world:.4f}")
    if rank == 0:
        torch.save(model.state_dict(), "diloco.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
