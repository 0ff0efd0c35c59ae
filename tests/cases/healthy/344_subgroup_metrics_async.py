"""A second process group for statistics, with asynchronous handles that are waited for one step later."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class DelayedMean:
    """all_reduce now, read at the next step: hides the latency of the statistics"""

    def __init__(self, group, world):
        self.group, self.world, self.pending, self.values = group, world, None, []

    def push(self, tensor):
        self.collect()
        buf = tensor.detach().clone()
        self.pending = (buf, dist.all_reduce(buf, group=self.group, async_op=True))

    def collect(self):
        if self.pending is not None:
            buf, work = self.pending
            work.wait()
            self.values.append(buf.item() / self.world)
            self.pending = None


class Mixer(nn.Module):
    def __init__(self, tokens=6, dim=8):
        super().__init__()
        self.token = nn.Sequential(nn.LayerNorm(tokens), nn.Linear(tokens, 12), nn.GELU(), nn.Linear(12, tokens))
        self.channel = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        x = x + self.token(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.channel(x)
        return self.out(x.mean(1))


def mixup(x, y, alpha=0.3):
    lam = torch.distributions.Beta(alpha, alpha).sample()
    perm = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stats_group = dist.new_group(list(range(world)))
    torch.manual_seed(5)
    model = DDP(Mixer())
    torch.manual_seed(500 + rank)  # data and mixup of this rank
    teacher = torch.linspace(-1, 1, 48).view(6, 8)
    opt = torch.optim.NAdam(model.parameters(), lr=5e-3)
    loss_mean, norm_max = DelayedMean(stats_group, world), []
    for step in range(40):
        x = torch.randn(24, 6, 8)
        y = (x * teacher).sum((1, 2)).tanh().unsqueeze(1)
        x, y = mixup(x, y)
        loss = nn.functional.huber_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        norm_max.append(nn.utils.clip_grad_norm_(model.parameters(), 2.0).item())
        opt.step()
        loss_mean.push(loss)
    loss_mean.collect()
    if rank == 0:
        v = loss_mean.values
        print(f"first ten {sum(v[:10]) / 10:.4f} last ten {sum(v[-10:]) / 10:.4f} largest norm {max(norm_max):.3f}")
    dist.barrier(group=stats_group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
