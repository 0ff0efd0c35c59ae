"""Starts its own two workers, which meet through a file."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def run(rank, world, rendezvous, out_dir):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=5e-3, total_steps=6 * 8)
    g = torch.Generator().manual_seed(6)
    x = torch.rand(256, 6, generator=g)
    y = (x.prod(1, keepdim=True) * 30).sin()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for xb, yb in loader:
            loss = nn.functional.smooth_l1_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            seen += torch.tensor([loss.item() * len(xb), len(xb)])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} loss {seen[0].item() / seen[1].item():.5f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(out_dir, "net.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs("out", exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".") as tmp:
        mp.spawn(run, args=(2, os.path.abspath(os.path.join(tmp, "store")), "out"), nprocs=2, join=True)
    print("reload", sum(v.numel() for v in torch.load("out/net.pt").values()), "weights")
