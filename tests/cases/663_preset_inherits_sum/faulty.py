"""Presets for a regression benchmark; `tiny`, `base` and `wide` inherit from each other."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PRESETS = {
    "default": {"optim": {"name": "SGD", "lr": 0.02, "momentum": 0.9}, "loss": {"name": "SmoothL1Loss", "beta": 0.5}, "model": {"width": 32, "depth": 2}, "epochs": 5, "batch": 16},
    "legacy": {"inherit": "default", "loss": {"reduction": "sum"}, "optim": {"lr": 0.002}},
    "wide": {"inherit": "legacy", "model": {"width": 64}},
}


def merge(base, extra):
    out = dict(base)
    for key, value in extra.items():
        out[key] = merge(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def preset(name):
    cfg = PRESETS[name]
    if "inherit" in cfg:
        cfg = merge(preset(cfg["inherit"]), {k: v for k, v in cfg.items() if k != "inherit"})
    return cfg


def build(section, namespace, *args):
    kwargs = {k: v for k, v in section.items() if k != "name"}
    return getattr(namespace, section["name"])(*args, **kwargs)


def mlp(width, depth):
    layers, d = [], 10
    for _ in range(depth):
        layers += [nn.Linear(d, width), nn.SiLU()]
        d = width
    return nn.Sequential(*layers, nn.Linear(d, 1))


def friedman(n):
    g = torch.Generator().manual_seed(5)
    x = torch.rand(n, 10, generator=g)
    y = 10 * torch.sin(3.1416 * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return TensorDataset(x, ((y - 14) / 5).unsqueeze(1))


def main():
    cfg = preset(sys.argv[1] if len(sys.argv) > 1 else "wide")
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2)
    model = DistributedDataParallel(mlp(**cfg["model"]))
    criterion = build(cfg["loss"], nn)
    optimizer = build(cfg["optim"], torch.optim, model.parameters())
    data = friedman(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg["batch"], sampler=sampler)
    if rank == 0:
        print(cfg)
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        sq, n = 0.0, 0
        for x, y in loader:
            out = model(x)
            loss = criterion(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sq += (out.detach() - y).pow(2).sum().item()
            n += len(x)
        total = torch.tensor([sq, n])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: train mse {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
