"""Score network on a mixture of points, judged with averaged weights."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Score(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.inp = nn.Linear(2, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, sigma):
        return self.body(self.inp(x) + self.time(sigma.log()))


class Averaged:
    """Exponential moving average of the weights, the same on all ranks."""

    def __init__(self, net, decay=0.97):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in net.named_parameters()}

    @torch.no_grad()
    def update(self, net):
        for k, v in net.named_parameters():
            self.shadow[k].lerp_(v, 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, net):
        for k, v in net.named_parameters():
            v.copy_(self.shadow[k])

    @contextlib.contextmanager
    def applied_to(self, net):
        kept = {k: v.detach().clone() for k, v in net.named_parameters()}
        self.copy_to(net)
        yield net
        with torch.no_grad():
            for k, v in net.named_parameters():
                v.copy_(kept[k])


def corners(n, gen):
    corner = torch.randint(0, 4, (n,), generator=gen)
    return torch.stack([corner % 2, corner // 2], 1) * 2.0 - 1 + 0.1 * torch.randn(n, 2, generator=gen)


def matching_loss(net, gen, n):
    x = corners(n, gen)
    sigma = torch.exp(torch.empty(n, 1).uniform_(-2.0, 0.5, generator=gen))
    noise = torch.randn(n, 2, generator=gen)
    return (net(x + sigma * noise, sigma) + noise).pow(2).mean()


@torch.no_grad()
def judge(net):
    return matching_loss(net, torch.Generator().manual_seed(31337), 2000).item()


def main(rounds=6, steps=25):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(21)
    model = DDP(Score())
    average = Averaged(model.module)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(600 + rank)
    for r in range(rounds):
        for _ in range(steps):
            opt.zero_grad()
            matching_loss(model, gen, 64).backward()
            opt.step()
            average.update(model.module)
        if rank == 0:
            average.copy_to(model.module)
            print(f"round {r}: loss of the averaged network {judge(model.module):.4f}")
        dist.barrier()
    if rank == 0:
        torch.save(average.shadow, "ema.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
