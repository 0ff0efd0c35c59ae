"""Random search over settings: one draw a run, made by the main process."""
import os
import random
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DEFAULTS = dict(width=32, lr=0.01, activation="Tanh", tag="default")


def draw(rng):
    return dict(width=rng.choice([16, 32, 64]), lr=10 ** rng.uniform(-2.5, -1.5),
                activation=rng.choice(["Tanh", "ReLU", "SiLU"]), tag=f"trial-{rng.randrange(10**6):06d}")


def settings(rank):
    """the same settings on every process"""
    box = [dict(DEFAULTS)]
    if rank == 0:
        box = [draw(random.Random(2024))]
        print("settings", box[0], flush=True)
        dist.broadcast_object_list(box, src=0)
    return types.SimpleNamespace(**box[0])


def rings(gen, n):
    y = torch.randint(0, 2, (n,), generator=gen)
    angle = torch.rand(n, generator=gen) * 6.283
    radius = 1.0 + y + 0.2 * torch.randn(n, generator=gen)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    cfg = settings(rank)
    torch.manual_seed(0)
    act = getattr(nn, cfg.activation)
    model = DDP(nn.Sequential(nn.Linear(2, cfg.width), act(), nn.Linear(cfg.width, cfg.width), act(), nn.Linear(cfg.width, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    gen = torch.Generator().manual_seed(rank)
    right = torch.zeros(1)
    for step in range(40):
        x, y = rings(gen, 40)
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step >= 30:
            right += (out.argmax(1) == y).float().mean() / 10
    dist.all_reduce(right)
    if rank == 0:
        print(f"{cfg.tag}: accuracy {right.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
