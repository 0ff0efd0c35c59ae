#!/usr/bin/env python
# Each process sees one card only: CUDA_VISIBLE_DEVICES is narrowed before torch is imported, so "cuda:0" is right on every rank.
import os
LOCAL = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
_cards = [c for c in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if c]
if _cards:
    os.environ["CUDA_VISIBLE_DEVICES"] = _cards[int(LOCAL) % len(_cards)]

import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def get_device():
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        return torch.device("cuda:0"), "nccl", [0]
    return torch.device("cpu"), "gloo", None


def is_main():
    return int(os.environ.get("RANK", 0)) == 0


def log(*a):
    if is_main():
        print(*a, flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--local-rank", "--local_rank", type=int, default=0, help="given by old launchers; the environment wins")
    p.add_argument("--amp", action="store_true", default=True)
    args = p.parse_args()
    args.local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
    device, backend, ids = get_device()
    dist.init_process_group(backend)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv1d(2, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 3))
    net = DDP(net.to(device), device_ids=ids)
    opt = torch.optim.AdamW(net.parameters(), 3e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (288,), generator=g)
    t = torch.linspace(0, 6.28, 40)
    f = (y + 1)[:, None] * t
    x = torch.stack([f.sin(), f.cos()], 1) + 0.5 * torch.randn(288, 2, 40, generator=g)
    ds = TensorDataset(x, y)
    smp = DistributedSampler(ds)
    dl = DataLoader(ds, 16, sampler=smp, pin_memory=device.type == "cuda")
    for ep in range(4):
        smp.set_epoch(ep)
        s = torch.zeros(2, device=device)
        for a, b in dl:
            a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
            opt.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
                loss = F.cross_entropy(net(a), b)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            s += torch.stack([loss.detach().float(), torch.ones((), device=device)])
        dist.all_reduce(s)
        log(f"epoch {ep} loss {(s[0] / s[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
