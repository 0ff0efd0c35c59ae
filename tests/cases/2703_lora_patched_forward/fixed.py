"""LoRA adapters for a frozen denoiser; adapters hook themselves into the base layers."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Denoiser(nn.Module):
    def __init__(self, dim=8, width=128, steps=50):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.inp = nn.Linear(dim, width)
        self.mid1 = nn.Linear(width, width)
        self.mid2 = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        h = h + F.silu(self.mid1(h))
        h = h + F.silu(self.mid2(h))
        return self.out(h)


class LoRAModule(nn.Module):
    def __init__(self, name, org_module, rank=8, alpha=8.0):
        super().__init__()
        self.lora_name = name
        self.down = nn.Linear(org_module.in_features, rank, bias=False)
        self.up = nn.Linear(rank, org_module.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank
        self.org = [org_module]
        self.org_forward = None

    def apply_to(self):
        self.org_forward = self.org[0].forward
        self.org[0].forward = self.forward

    def forward(self, x):
        return self.org_forward(x) + self.up(self.down(x)) * self.scale


class LoRANetwork(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        targets = [(n, m) for n, m in base.named_modules() if isinstance(m, nn.Linear)]
        self.loras = nn.ModuleList(LoRAModule(n, m, rank) for n, m in targets)

    def apply_to(self):
        for lora in self.loras:
            lora.apply_to()


def make_data(count, dim, seed):
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(2, dim, generator=g)
    angle = torch.rand(count, generator=g) * 2 * math.pi
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    return circle @ basis + 0.05 * torch.randn(count, dim, generator=g)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--network_dim", type=int, default=8)
    p.add_argument("--learning_rate", type=float, default=3e-3)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def train(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    steps, dim = 50, 8
    beta = torch.linspace(1e-3, 0.12, steps)
    alpha_bar = torch.cumprod(1 - beta, 0)

    unet = Denoiser(dim, steps=steps)
    unet.requires_grad_(False)
    unet.eval()
    network = LoRANetwork(unet, args.network_dim)
    network.apply_to()
    network = DDP(network)
    params = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=1e-2)

    dataset = TensorDataset(make_data(1536, dim, 11))
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    noise_rng = torch.Generator().manual_seed(args.seed * 100 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (x0,) in loader:
            t = torch.randint(0, steps, (len(x0),), generator=noise_rng)
            noise = torch.randn(x0.shape, generator=noise_rng)
            a = alpha_bar[t][:, None]
            noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
            loss = F.mse_loss(unet(noisy, t), noise)
            loss.backward()
            for p in params:
                dist.all_reduce(p.grad)
                p.grad /= world
            nn.utils.clip_grad_norm_(params, args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} avr_loss={total[0] / total[1]:.4f}", flush=True)

    if rank == 0:
        torch.save(network.module.state_dict(), "lora.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(parse())
