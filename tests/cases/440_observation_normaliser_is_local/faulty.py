"""Behaviour cloning from two robots with a running observation normaliser."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class RunningNorm(nn.Module):
    """Welford / Chan update of mean and variance"""

    def __init__(self, size, eps=1e-4):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(eps, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x):
        x = x.double()
        n, mean, var = len(x), x.mean(0), x.var(0, unbiased=False)
        delta, total = mean - self.mean, self.count + n
        self.var.copy_((self.var * self.count + var * n + delta**2 * self.count * n / total) / total)
        self.mean.add_(delta * n / total)
        self.count.copy_(total)

    def forward(self, x):
        if self.training:
            self.update(x)
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).float().clamp(-5, 5)


class Robot:
    """joint encoders of the second robot have another offset and range"""

    def __init__(self, rank):
        self.g = torch.Generator().manual_seed(rank)
        self.offset, self.range = (0.0, 1.0) if rank == 0 else (2.0, 3.0)

    def demonstrate(self, n):
        q = torch.randn(n, 6, generator=self.g)
        action = torch.tanh(q[:, :3] - q[:, 3:])
        return self.offset + self.range * q, action


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(14)
    norm = RunningNorm(6)
    actor = DDP(nn.Sequential(nn.Linear(6, 48), nn.ELU(), nn.Linear(48, 3)))
    opt = torch.optim.Adam(actor.parameters(), lr=3e-3)
    robot = Robot(rank)
    for it in range(60):
        obs, act = robot.demonstrate(64)
        loss = nn.functional.mse_loss(actor(norm(obs)), act)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        opt.step()
        if it % 20 == 19:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"iteration {it + 1}: {shown.item() / dist.get_world_size():.4f}")
    if rank == 0:
        torch.save({"actor": actor.module.state_dict(), "norm": norm.state_dict()}, "policy.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
