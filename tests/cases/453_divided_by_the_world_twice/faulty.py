"""Poisson regression with an objective object."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Objective(nn.Module):
    """data term plus penalty, as this process's contribution to the global objective"""

    def __init__(self, penalty):
        super().__init__()
        self.penalty = penalty

    def forward(self, log_rate, count, weights):
        nll = (log_rate.exp() - count * log_rate).mean()
        reg = sum(w.pow(2).sum() for w in weights)
        return (nll + self.penalty * reg) / dist.get_world_size()


class Neurons(nn.Module):
    """spike counts from a stimulus history"""

    def __init__(self, history=15, neurons=6):
        super().__init__()
        self.filters = nn.Linear(history, neurons)

    def forward(self, stimulus):
        return self.filters(stimulus).clamp(max=4)


def recordings(rank, n):
    g = torch.Generator().manual_seed(rank)
    k = torch.randn(6, 15, generator=torch.Generator().manual_seed(77)) * 0.3
    while True:
        s = torch.randn(n, 15, generator=g)
        yield s, torch.poisson((s @ k.T).clamp(max=4).exp(), generator=g)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = Neurons()
    model = DDP(net)
    objective = Objective(penalty=1e-3)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for step, (s, c) in enumerate(recordings(rank, 32)):
        loss = objective(model(s), c, [net.filters.weight])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            nll = loss.detach().clone()
            dist.all_reduce(nll)
            if rank == 0:
                print(f"step {step:3d} objective {nll.item():.4f}")
        if step == 40:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
