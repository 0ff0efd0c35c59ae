"""Fine-tune a small regressor: last layer plus low-rank adapters on the projections."""
import argparse
import os
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        gate = torch.sigmoid(self.to_q(h))
        return x + gate * self.to_v(h)


class Regressor(nn.Module):
    def __init__(self, dim=16, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 2)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)


def unwrap(model):
    return model.module if hasattr(model, "module") else model


def inject_lora(model, rank_r=4, targets=("to_q", "to_v"), scale=1.0):
    """adds lora_down and lora_up to every target layer and returns the new parameters"""
    new = []
    for name, layer in list(unwrap(model).named_modules()):
        if not name.endswith(targets):
            continue
        layer.requires_grad_(False)
        layer.lora_down = nn.Linear(layer.in_features, rank_r, bias=False)
        layer.lora_up = nn.Linear(rank_r, layer.out_features, bias=False)
        nn.init.normal_(layer.lora_up.weight, std=0.02)
        plain = layer.forward

        def forward(self, x, plain=plain):
            return plain(x) + scale * self.lora_up(self.lora_down(x))

        layer.forward = types.MethodType(forward, layer)
        new += [layer.lora_down.weight, layer.lora_up.weight]
    return new


def stream(seed, batch, dim):
    gen = torch.Generator().manual_seed(seed)
    mix = torch.linspace(-1, 1, dim * 2).reshape(dim, 2)
    while True:
        x = torch.randn(batch, dim, generator=gen)
        yield x, torch.tanh(x @ mix) + 0.05 * torch.randn(batch, 2, generator=gen)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lora-rank", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3 + rank)
    net = Regressor()
    for p in net.blocks.parameters():
        p.requires_grad_(False)

    adapters = inject_lora(net, args.lora_rank)
    model = DistributedDataParallel(net)
    groups = [{"params": adapters, "lr": args.lr}, {"params": unwrap(model).out.parameters(), "lr": args.lr / 2}]
    opt = torch.optim.AdamW(groups, weight_decay=0.01)

    for step, (x, y) in zip(range(args.steps), stream(50 + rank, args.batch, 16)):
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"{step:4d} {total.item() / world:.4f}")
    if rank == 0:
        torch.save({"lora": [p.detach() for p in adapters]}, "adapters.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
