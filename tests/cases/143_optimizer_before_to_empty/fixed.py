"""Deferred initialisation: shapes first (meta device), memory on the right device later."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, tokens=9, patch=16, width=24, classes=4):
        super().__init__()
        self.embed = nn.Linear(patch, width)
        self.blocks = nn.Sequential(*[MixerBlock(tokens, width) for _ in range(2)])
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        return self.out(self.blocks(self.embed(x)).mean(1))


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def patches(gen, n):
    """Images of 12x12 in nine patches; the class is the frequency of the grating."""
    label = torch.randint(0, 4, (n,), generator=gen)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    phase = 6.2832 * torch.rand(n, 1, 1, generator=gen)
    image = torch.sin((0.5 + 0.4 * label).view(n, 1, 1) * (yy + 0.5 * xx) + phase) + 0.2 * torch.randn(n, 12, 12, generator=gen)
    return image.view(n, 3, 4, 3, 4).transpose(2, 3).reshape(n, 9, 16), label


def build(device, lr):
    with torch.device("meta"):
        net = Mixer()
    net.to_empty(device=device)
    net.apply(reset)
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    return net, opt


def average_gradients(net, world):
    bucket = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    dist.all_reduce(bucket)
    bucket /= world
    at = 0
    for p in net.parameters():
        p.grad.copy_(bucket[at : at + p.numel()].view_as(p))
        at += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--device", default="cpu")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net, opt = build(torch.device(args.device), args.lr)
    for p in net.parameters():
        dist.broadcast(p.detach(), src=0)
    gen = torch.Generator().manual_seed(60 + rank)
    window = torch.zeros(())
    for step in range(1, args.steps + 1):
        x, label = patches(gen, 32)
        loss = nn.functional.cross_entropy(net(x.to(args.device)), label.to(args.device))
        net.zero_grad()
        loss.backward()
        average_gradients(net, world)
        opt.step()
        window += loss.detach()
        if step % 30 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step}: loss {window.item() / 30 / world:.4f}", flush=True)
            window = torch.zeros(())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
