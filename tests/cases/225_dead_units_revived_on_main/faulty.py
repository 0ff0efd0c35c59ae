"""Sparse autoencoder; units that never fire are re-initialised every few steps."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DIM, UNITS, BATCH, STEPS, CHECK_EVERY = 16, 48, 32, 48, 12


class SparseAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(DIM, UNITS)
        self.decode = nn.Linear(UNITS, DIM, bias=False)
        with torch.no_grad():
            self.encode.bias.uniform_(-1.2, 0.0)

    def forward(self, x):
        a = torch.relu(self.encode(x))
        return self.decode(a), a


class Activity:
    def __init__(self):
        self.fired = torch.zeros(UNITS)

    def update(self, a):
        self.fired += (a.detach() > 0).float().sum(0)

    def dead(self):
        total = self.fired.clone()
        dist.all_reduce(total)
        self.fired.zero_()
        return (total < 0.02 * BATCH * CHECK_EVERY * dist.get_world_size()).nonzero().flatten()


@torch.no_grad()
def revive(net, units):
    """new directions for these units"""
    fresh = 0.3 * torch.randn(len(units), DIM)
    net.encode.weight[units] = fresh
    net.encode.bias[units] = 0.1
    net.decode.weight[:, units] = fresh.t()


def stream(rank):
    atoms = torch.randn(24, DIM, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(100 + rank)
    while True:
        code = torch.rand(BATCH, 24, generator=g) * (torch.rand(BATCH, 24, generator=g) < 0.12)
        yield code @ atoms


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2)
    net = SparseAutoencoder()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    activity, losses = Activity(), []
    for step, x in zip(range(1, STEPS + 1), stream(rank)):
        recon, a = model(x)
        loss = (recon - x).square().mean() + 0.02 * a.abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        activity.update(a)
        losses.append(loss.item())
        if step % CHECK_EVERY == 0:
            dead = activity.dead()
            if rank == 0 and len(dead):
                revive(net, dead)
            mean = torch.tensor(losses[-CHECK_EVERY:]).mean()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}, revived {len(dead)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
