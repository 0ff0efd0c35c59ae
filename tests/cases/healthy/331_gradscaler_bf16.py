"""Mixed precision on CPU: first fp16-style loss scaling with clipping, then bf16 autocast without a scaler."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps-per-phase", type=int, default=24)
parser.add_argument("--clip", type=float, default=1.0)
args = parser.parse_args()


def dataset():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(768, 16, generator=g)
    w = torch.randn(16, 3, generator=g)
    return TensorDataset(x, (x @ w + 0.5 * torch.randn(768, 3, generator=g)).argmax(1))


def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def phase(name, model, opt, stream, scaler, dtype):
    model.train()
    total = torch.zeros(())
    for _ in range(args.steps_per_phase):
        x, y = next(stream)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(opt)
        scaler.update()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{name}: loss {total.item() / args.steps_per_phase / dist.get_world_size():.4f} scale {scaler.get_scale():g}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 3)))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = dataset()
    sampler = DistributedSampler(data, seed=2)
    stream = forever(DataLoader(data, 16, sampler=sampler), sampler)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
    phase("scaled", model, opt, stream, scaler, torch.bfloat16)
    phase("bf16  ", model, opt, stream, torch.amp.GradScaler("cpu", enabled=False), torch.bfloat16)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
