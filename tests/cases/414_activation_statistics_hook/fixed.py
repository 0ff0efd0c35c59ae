"""Watch dead or exploding layers: spread of the activations by layer and epoch."""
import os
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ActivationWatch:
    def __init__(self, module, kinds=(nn.Linear, nn.LayerNorm)):
        self.series = defaultdict(list)
        self.handles = [m.register_forward_hook(self.make_hook(name)) for name, m in module.named_modules() if isinstance(m, kinds)]

    def make_hook(self, name):
        def hook(module, args, output):
            if module.training:
                self.series[name].append(output.detach().std().item())
        return hook

    def table(self):
        for name, values in self.series.items():
            t = torch.tensor(values)
            yield name, t[:5].mean().item(), t[-5:].mean().item()

    def close(self):
        for h in self.handles:
            h.remove()


def residual(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class ResMLP(nn.Module):
    def __init__(self, n_in=24, width=96, depth=3, classes=4):
        super().__init__()
        self.inp = nn.Linear(n_in, width)
        self.blocks = nn.ModuleList(residual(width) for _ in range(depth))
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(12)
    net = ResMLP()
    watch = ActivationWatch(net)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    centres = torch.randn(4, 24)
    gen = torch.Generator().manual_seed(rank)
    for step in range(70):
        y = torch.randint(0, 4, (512,), generator=gen)
        x = centres[y] + 1.5 * torch.randn(512, 24, generator=gen)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    watch.close()
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"loss {mean.item() / world:.4f}")
        for name, first, last in watch.table():
            print(f"{name:12s} std {first:.3f} -> {last:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
