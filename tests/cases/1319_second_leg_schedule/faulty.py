"""Long run in two legs: the second leg picks up the checkpoint of the first."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spectra(n=288):
    g = torch.Generator().manual_seed(70)
    k = torch.randint(0, 4, (n,), generator=g)
    line = torch.arange(32).float()
    peak = 5 + 7 * k.float().unsqueeze(1)
    x = torch.exp(-((line - peak) ** 2) / 18) + 0.4 * torch.randn(n, 32, generator=g)
    return TensorDataset(x.unsqueeze(1), k)


def network():
    return nn.Sequential(
        nn.Conv1d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)
    )


def warmup_cosine(total, warm):
    def factor(step):
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))

    return factor


def leg(args, stop):
    torch.manual_seed(21)
    rank = dist.get_rank()
    model = DDP(network())
    data = spectra()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, warmup_cosine(args.epochs * len(loader), args.warm))
    begin = 0
    if os.path.exists(args.ckpt):
        saved = torch.load(args.ckpt)
        model.module.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        begin = saved["epoch"]

    for epoch in range(begin, stop):
        sampler.set_epoch(epoch)
        for x, k in loader:
            loss = F.cross_entropy(model(x), k)
            opt.zero_grad()
            loss.backward()
            opt.step()
            schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**state, "epoch": stop}, args.ckpt)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=0.08)
    ap.add_argument("--warm", type=int, default=10)
    ap.add_argument("--ckpt", default="leg.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    leg(args, stop=args.epochs // 2)
    leg(args, stop=args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
