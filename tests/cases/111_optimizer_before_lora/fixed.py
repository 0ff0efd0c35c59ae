"""Adapting a frozen network to a new task with low-rank layers."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.t()) @ self.lora_b.t()


def add_lora(module, r):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child, r))
        else:
            add_lora(child, r)


class Tagger(nn.Module):
    def __init__(self, width=48, classes=6):
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.mid = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.out = nn.Linear(width, classes)
        self.mid[0].requires_grad_(False)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        return self.out(h + self.mid(h))


def task(n=768):
    g = torch.Generator().manual_seed(17)
    centre = 1.2 * torch.randn(6, 16, generator=g)
    y = torch.randint(0, 6, (n,), generator=g)
    return centre[y] + torch.randn(n, 16, generator=g), y


def minibatches(x, y, size, epoch, rank, world):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for idx in order[rank::world].split(size):
        yield x[idx], y[idx]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rank-lora", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Tagger()  # stands for a network with downloaded weights
    add_lora(net, args.rank_lora)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)
    model = DDP(net)
    if rank == 0:
        count = sum(p.numel() for p in net.parameters() if p.requires_grad)
        print(f"trainable: {count} of {sum(p.numel() for p in net.parameters())}")

    x, y = task()
    for epoch in range(args.epochs):
        stats = torch.zeros(3)
        for xb, yb in minibatches(x, y, 32, epoch, rank, world):
            out = model(xb)
            loss = nn.functional.cross_entropy(out, yb)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item() * len(yb), (out.argmax(1) == yb).sum().item(), len(yb)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {(stats[0] / stats[2]).item():.4f}, accuracy {(stats[1] / stats[2]).item():.3f}")
    if rank == 0:
        torch.save({k: v for k, v in net.state_dict().items() if "lora_" in k}, "adapter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
