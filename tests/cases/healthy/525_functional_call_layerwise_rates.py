"""Master weights in fp32, the forward uses bfloat16 copies by functional_call; discriminative learning rates."""
import dataclasses
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 1e-2
    layer_decay: float = 0.7
    batch: int = 32
    epochs: int = 4
    widths: tuple = (12, 48, 48, 3)


class LowPrecision(nn.Module):
    """keeps fp32 parameters, computes with rounded ones"""

    def __init__(self, inner, dtype=torch.bfloat16):
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x):
        rounded = {name: p.to(self.dtype) for name, p in self.inner.named_parameters()}
        return functional_call(self.inner, rounded, (x.to(self.dtype),)).float()


def bar(iterable, label, enabled, width=20):
    total = len(iterable)
    for i, item in enumerate(iterable, 1):
        yield item
        if enabled and (i % 5 == 0 or i == total):
            done = width * i // total
            sys.stderr.write(f"\r{label} |{'#' * done}{'.' * (width - done)}| {i}/{total}" + ("\n" if i == total else ""))


def layerwise(net, cfg):
    layers = [m for m in net if isinstance(m, nn.Linear)]
    depth = len(layers)
    return [{"params": list(m.parameters()), "lr": cfg.lr * cfg.layer_decay ** (depth - 1 - k)} for k, m in enumerate(layers)]


def main(cfg=Settings()):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    modules = []
    for a, b in zip(cfg.widths[:-1], cfg.widths[1:]):
        modules += [nn.Linear(a, b), nn.ReLU()]
    net = nn.Sequential(*modules[:-1])
    model = DDP(LowPrecision(net))
    opt = torch.optim.AdamW(layerwise(net, cfg), weight_decay=0.01)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(640, 12, generator=g)
    data = TensorDataset(x, x.view(640, 3, 4).amax(2).argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg.batch, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for xb, yb in bar(loader, f"epoch {epoch}", rank == 0):
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stats += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {(stats[0] / stats[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
