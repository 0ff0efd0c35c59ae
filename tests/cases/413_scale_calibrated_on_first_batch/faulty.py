"""Mixed precision on CPU with an automatic choice of the initial loss scale."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP


class Heavy(nn.Module):
    def __init__(self, n_in=10, width=48):
        super().__init__()
        self.a = nn.Linear(n_in, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = h + torch.tanh(self.b(h))
        return self.c(h).squeeze(-1).float()


def rainfall(rank, batch=128):
    """one station per process; mountain stations measure much larger amounts"""
    g = torch.Generator().manual_seed(rank)
    amount = 1.0 if rank == 0 else 5.0
    w = torch.linspace(-0.5, 0.5, 10)
    while True:
        x = torch.randn(batch, 10, generator=g)
        yield x, amount * ((x @ w).relu() + 0.1 * torch.rand(batch, generator=g))


class Precision:
    """autocast + GradScaler; scale such that the first scaled loss is about `target`"""

    def __init__(self, target=2.0**14):
        self.target, self.scaler = target, None

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def calibrate(self, loss):
        exponent = math.floor(math.log2(self.target / max(loss.item(), 1e-8)))
        self.scaler = GradScaler("cpu", init_scale=2.0**exponent, growth_interval=1000)

    def backward_and_step(self, loss, opt):
        if self.scaler is None:
            self.calibrate(loss)
        self.scaler.scale(loss).backward()
        self.scaler.step(opt)
        self.scaler.update()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Heavy())
    opt = torch.optim.SGD(model.parameters(), lr=5e-3)
    amp = Precision()
    for step, (x, y) in enumerate(rainfall(rank)):
        with amp.autocast():
            pred = model(x)
        loss = nn.functional.mse_loss(pred, y)
        opt.zero_grad()
        amp.backward_and_step(loss, opt)
        if step % 10 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"{step} loss {total.item() / dist.get_world_size():.3f}")
        if step == 40:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
