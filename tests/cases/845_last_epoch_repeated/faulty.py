"""Training in two sittings with a checkpoint in between."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def tides(n=256):
    g = torch.Generator().manual_seed(80)
    t = 24 * torch.rand(n, 1, generator=g)
    x = torch.cat([torch.sin(0.506 * t), torch.cos(0.506 * t), torch.sin(0.262 * t), torch.cos(0.262 * t)], 1)
    return TensorDataset(x, 1.2 * x[:, :1] + 0.4 * x[:, 2:3] * x[:, 1:2] + 0.05 * torch.randn(n, 1, generator=g))


def session(path, stop_after, rank):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    data = tides()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    start_epoch = 0
    if os.path.exists(path):
        ckpt = torch.load(path, map_location="cpu")
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        sched.load_state_dict(ckpt["sched"])
        start_epoch = ckpt["epoch"]
        dist.barrier()

    for epoch in range(start_epoch, stop_after):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.5f}", flush=True)
            torch.save(
                {"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                 "epoch": epoch},
                path,
            )
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", default="tides.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    session(args.ckpt, 3, rank)
    session(args.ckpt, 6, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
