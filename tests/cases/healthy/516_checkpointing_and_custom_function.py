"""Shared layer, activation checkpointing, quantised activations with a straight-through gradient."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.save_for_backward(x)
        return (x.clamp(-1, 1) * levels).round() / levels

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1), None


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.w1, self.w2 = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.w2(Quantise.apply(self.w1(self.norm(x)), 8))


class Recurrent(nn.Module):
    def __init__(self, n_in=10, dim=24, repeats=3):
        super().__init__()
        self.inp, self.layer, self.out, self.repeats = nn.Linear(n_in, dim), Layer(dim), nn.Linear(dim, 1), repeats

    def forward(self, x):
        h = self.inp(x)
        for _ in range(self.repeats):
            h = checkpoint(self.layer, h, use_reentrant=False) if self.training else self.layer(h)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Recurrent())
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(50):
        x = torch.randn(40, 10, generator=gen)
        y = (x[:, :5].sum(1, keepdim=True) - x[:, 5:].abs().sum(1, keepdim=True) + 4).tanh()
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
