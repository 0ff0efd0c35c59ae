"""Tabular regression with a wide residual net; every now and then a report of the activations (dead units, scale)."""
import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger("tabular")


class ResidualUnit(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.act = nn.ReLU()
        self.second = nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(self.act(self.first(self.norm(x))))


class TabularNet(nn.Module):
    def __init__(self, columns, width=192, depth=3):
        super().__init__()
        self.inlet = nn.Linear(columns, width)
        self.units = nn.Sequential(*[ResidualUnit(width) for _ in range(depth)])
        self.outlet = nn.Linear(width, 1)

    def forward(self, x):
        return self.outlet(self.units(self.inlet(x))).squeeze(1)


class ActivationReport:
    """Listens to all activations of a network while it is attached."""

    def __init__(self, net, kinds=(nn.ReLU, nn.LayerNorm)):
        self.seen = []
        self.handles = [
            module.register_forward_hook(self.listen(name))
            for name, module in net.named_modules()
            if isinstance(module, kinds)
        ]

    def listen(self, name):
        def hook(module, inputs, output):
            self.seen.append((name, output))

        return hook

    @torch.no_grad()
    def summary(self):
        lines = []
        for name, output in self.seen:
            dead = (output <= 0).all(0).float().mean().item()
            lines.append(f"{name}: std {output.std().item():.3f} dead {100 * dead:.1f}%")
        return "; ".join(lines)

    def detach(self):
        for handle in self.handles:
            handle.remove()
        self.seen.clear()


def table(rows, columns, gen):
    x = torch.randn(rows, columns, generator=gen)
    y = torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] - (x[:, 3] > 0).float() * x[:, 4]
    return x, y + 0.05 * torch.randn(rows, generator=gen)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--columns", type=int, default=12)
    parser.add_argument("--report-every", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")
    torch.manual_seed(14)
    net = TabularNet(args.columns)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(60 + rank)

    for step in range(args.steps):
        x, y = table(args.batch, args.columns, gen)
        report = ActivationReport(net) if step % args.report_every == 0 else None
        loss = F.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if report is not None:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            log.info("step %d loss %.4f | %s", step, mean.item() / world, report.summary())
            report.seen.clear()
    log.info("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
