"""Train until the accuracy is good enough."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def cones(n=240):
    g = torch.Generator().manual_seed(65)
    y = torch.randint(0, 3, (n,), generator=g)
    centre = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    return TensorDataset(centre[y] + 0.5 * torch.randn(n, 2, generator=g), y)


def run_epoch(model, loader, opt):
    hits = torch.zeros(2)
    for x, y in loader:
        out = model(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        hits += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-epochs", type=int, default=30)
    ap.add_argument("--target", type=float, default=0.95)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = cones()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)

    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        acc = run_epoch(model, loader, opt)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.3f}", flush=True)
        if acc >= args.target:
            break

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "cones.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
