"""Data-parallel training without DDP; the processes are spawned by the script."""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def seed_everything(seed):
    torch.manual_seed(seed)


def spirals(n=400):
    g = torch.Generator().manual_seed(61)
    label = torch.randint(0, 2, (n,), generator=g)
    r = torch.rand(n, generator=g).sqrt()
    phi = 5 * r + 3.1416 * label
    x = torch.stack([r * phi.cos(), r * phi.sin()], 1) + 0.03 * torch.randn(n, 2, generator=g)
    return TensorDataset(x, label)


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def worker(rank, world, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    seed_everything(args.seed)

    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = spirals()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        score = torch.zeros(2)
        for x, label in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, label)
            model.zero_grad()
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
            score += torch.tensor([(out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(score)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(score[0] / score[1]).item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--world", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=42)
    args = ap.parse_args()
    args.port = free_port()
    mp.spawn(worker, args=(args.world, args), nprocs=args.world)


if __name__ == "__main__":
    main()
