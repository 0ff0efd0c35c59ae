"""
A minimal class-conditional diffusion training script using PyTorch DDP.
"""
import argparse
import logging
import os
from collections import OrderedDict
from copy import deepcopy
from glob import glob
from time import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    ema_params = OrderedDict(ema_model.named_parameters())
    for name, param in model.named_parameters():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def create_logger(logging_dir):
    logger = logging.getLogger(__name__)
    if dist.get_rank() == 0:
        logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S",
                            handlers=[logging.StreamHandler(), logging.FileHandler(f"{logging_dir}/log.txt")])
    else:
        logger.addHandler(logging.NullHandler())
    return logger


def timestep_embedding(t, dim):
    freqs = torch.exp(-torch.arange(dim // 2) * (9.21 / (dim // 2)))
    a = t[:, None].float() * freqs[None]
    return torch.cat([a.cos(), a.sin()], -1)


class DiTBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(d, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(d, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        nn.init.zeros_(self.ada[1].weight)
        nn.init.zeros_(self.ada[1].bias)

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.ada(c)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + s1) + b1
        x = x + g1 * self.attn(h, h, h, need_weights=False)[0]
        return x + g2 * self.mlp(self.norm2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self, num_classes, d=48, depth=2, p_drop=0.1):
        super().__init__()
        self.x_embed = nn.Linear(4, d)
        self.pos = nn.Parameter(torch.randn(1, 16, d) * 0.02)
        self.y_embed = nn.Embedding(num_classes + 1, d)
        self.t_embed = nn.Sequential(nn.Linear(32, d), nn.SiLU(), nn.Linear(d, d))
        self.blocks = nn.ModuleList(DiTBlock(d, 4) for _ in range(depth))
        self.final = nn.Linear(d, 4)
        nn.init.zeros_(self.final.weight)
        nn.init.zeros_(self.final.bias)
        self.num_classes, self.p_drop = num_classes, p_drop

    def forward(self, x, t, y):
        if self.training:
            y = torch.where(torch.rand(y.shape[0]) < self.p_drop, self.num_classes, y)
        tokens = F.unfold(x, 2, stride=2).transpose(1, 2)
        h = self.x_embed(tokens) + self.pos
        c = self.t_embed(timestep_embedding(t, 32)) + self.y_embed(y)
        for block in self.blocks:
            h = block(h, c)
        return F.fold(self.final(h).transpose(1, 2), 8, 2, stride=2)


class Diffusion:
    def __init__(self, steps):
        self.num_timesteps = steps
        self.betas = torch.linspace(1e-3, 0.15, steps)
        self.abar = torch.cumprod(1 - self.betas, 0)

    def training_losses(self, model, x, t, kw):
        noise = torch.randn_like(x)
        a = self.abar[t].view(-1, 1, 1, 1)
        pred = model(a.sqrt() * x + (1 - a).sqrt() * noise, t, **kw)
        return {"loss": ((pred - noise) ** 2).mean((1, 2, 3))}

    @torch.no_grad()
    def p_sample_loop(self, fn, z, y):
        for i in reversed(range(self.num_timesteps)):
            t = torch.full((len(z),), i)
            eps = fn(z, t, y)
            b, a = self.betas[i], self.abar[i]
            z = (z - b / (1 - a).sqrt() * eps) / (1 - b).sqrt()
            if i:
                z = z + b.sqrt() * torch.randn_like(z)
        return z


def make_data(n, classes, seed):
    g = torch.Generator().manual_seed(seed)
    protos = torch.randn(classes, 1, 8, 8, generator=torch.Generator().manual_seed(8)).sign()
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(protos[y] + 0.1 * torch.randn(n, 1, 8, 8, generator=g), y), protos


def main(args):
    dist.init_process_group("gloo")
    assert args.global_batch_size % dist.get_world_size() == 0, "Batch size must be divisible by world size."
    rank = dist.get_rank()
    seed = args.global_seed * dist.get_world_size() + rank
    torch.manual_seed(seed)
    print(f"Starting rank={rank}, seed={seed}, world_size={dist.get_world_size()}.")

    if rank == 0:
        os.makedirs(args.results_dir, exist_ok=True)
        experiment_dir = f"{args.results_dir}/{len(glob(f'{args.results_dir}/*')):03d}-tiny"
        checkpoint_dir = f"{experiment_dir}/checkpoints"
        os.makedirs(checkpoint_dir, exist_ok=True)
        logger = create_logger(experiment_dir)
    else:
        logger = create_logger(None)

    model = DiT(args.num_classes)
    ema = deepcopy(model)
    requires_grad(ema, False)
    model = DDP(model)
    diffusion = Diffusion(args.diffusion_steps)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    dataset, protos = make_data(2048, args.num_classes, 4)
    sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=rank, shuffle=True,
                                 seed=args.global_seed)
    loader = DataLoader(dataset, batch_size=args.global_batch_size // dist.get_world_size(), shuffle=False,
                        sampler=sampler, drop_last=True)

    update_ema(ema, model.module, decay=0)  # Ensure EMA is initialized with synced weights
    model.train()
    ema.eval()
    train_steps, log_steps, running_loss, start_time = 0, 0, 0, time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        logger.info(f"Beginning epoch {epoch}...")
        for x, y in loader:
            t = torch.randint(0, diffusion.num_timesteps, (x.shape[0],))
            loss = diffusion.training_losses(model, x, t, dict(y=y))["loss"].mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model.module, decay=0.95)

            running_loss += loss.item()
            log_steps += 1
            train_steps += 1
            if train_steps % args.log_every == 0:
                avg_loss = torch.tensor(running_loss / log_steps)
                dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
                avg_loss = avg_loss.item() / dist.get_world_size()
                logger.info(f"(step={train_steps:07d}) Train Loss: {avg_loss:.4f}, "
                            f"Steps/Sec: {log_steps / (time() - start_time):.2f}")
                running_loss, log_steps, start_time = 0, 0, time()
            if train_steps % args.ckpt_every == 0:
                if rank == 0:
                    torch.save({"model": model.module.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()},
                               f"{checkpoint_dir}/{train_steps:07d}.pt")
                dist.barrier()
    model.eval()
    if rank == 0:
        y = torch.arange(args.num_classes).repeat(8)
        sample = diffusion.p_sample_loop(ema, torch.randn(len(y), 1, 8, 8), y)
        logger.info(f"distance of samples to their class pattern: {(sample - protos[y]).pow(2).mean():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--results-dir", type=str, default="results")
    parser.add_argument("--num-classes", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--global-seed", type=int, default=0)
    parser.add_argument("--diffusion-steps", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--ckpt-every", type=int, default=64)
    main(parser.parse_args())
