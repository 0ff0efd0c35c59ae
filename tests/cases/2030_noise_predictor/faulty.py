"""Small diffusion model on two-dimensional glyphs, with an averaged copy whose error is tracked along the way."""
from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class Setup:
    steps: int = 90
    batch: int = 24
    side: int = 16
    levels: int = 50
    lr: float = 2e-3
    ema: float = 0.95
    print_every: int = 15


@dataclass
class Curves:
    """Tensors are kept as they come; they are turned into numbers when a line is printed."""

    values: dict = field(default_factory=dict)

    def add(self, **named):
        for name, value in named.items():
            self.values.setdefault(name, []).append(value)

    def tail(self, name, last):
        return fmean(v.item() for v in self.values[name][-last:])


class NoiseNet(nn.Module):
    def __init__(self, levels, width=24):
        super().__init__()
        self.level = nn.Embedding(levels, width)
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.enter(x) + self.level(t)[:, :, None, None])
        return self.leave(F.silu(self.middle(h)) + h)


def glyphs(count, side, gen):
    """Crosses and frames of random size."""
    radius = torch.randint(3, side // 2, (count, 1, 1), generator=gen)
    axis = torch.arange(side) - side // 2
    y, x = axis[None, :, None].abs(), axis[None, None, :].abs()
    cross = ((x == 0) | (y == 0)) & (torch.maximum(x, y) <= radius)
    frame = torch.maximum(x, y) == radius
    pick = torch.rand(count, 1, 1, generator=gen) < 0.5
    return torch.where(pick, cross, frame).float()[:, None] * 2 - 1


class Diffusion:
    def __init__(self, setup):
        self.setup = setup
        self.keep = torch.cumprod(1 - torch.linspace(1e-3, 0.12, setup.levels), 0)

    def corrupt(self, clean, gen):
        t = torch.randint(self.setup.levels, (len(clean),), generator=gen)
        noise = torch.randn(clean.shape, generator=gen)
        a = self.keep[t][:, None, None, None]
        return a.sqrt() * clean + (1 - a).sqrt() * noise, t, noise

    def error(self, model, noisy, t, noise):
        return F.mse_loss(model(noisy, t), noise)

    def averaged_error(self, average, noisy, t, noise):
        return self.error(average, noisy, t, noise)


def main():
    setup = Setup()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40)
    net = NoiseNet(setup.levels)
    model = DistributedDataParallel(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(setup.ema))
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.lr)
    diffusion, curves = Diffusion(setup), Curves()
    gen = torch.Generator().manual_seed(rank)

    for step in range(1, setup.steps + 1):
        noisy, t, noise = diffusion.corrupt(glyphs(setup.batch, setup.side, gen), gen)
        loss = diffusion.error(model, noisy, t, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
        curves.add(loss=loss.detach(), averaged=diffusion.averaged_error(average, noisy, t, noise))
        if step % setup.print_every == 0:
            pair = torch.tensor([curves.tail(name, setup.print_every) for name in ("loss", "averaged")])
            dist.all_reduce(pair)
            if rank == 0:
                print(f"step {step:3d}  error {pair[0] / world:.4f}  averaged copy {pair[1] / world:.4f}", flush=True)
    if rank == 0:
        torch.save(average.module.state_dict(), "averaged.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
