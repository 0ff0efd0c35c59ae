"""Decentralised SGD: every worker trains on its own sensors and mixes its weights with its ring neighbours."""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def sensor_data(rank, n, dim=20):
    shared = torch.Generator().manual_seed(0)
    w1, w2 = torch.randn(dim, 6, generator=shared), torch.randn(6, 1, generator=shared)
    own = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(n, dim, generator=own) + 0.3 * torch.randn(dim, generator=own)
    y = torch.tanh(x @ w1 / dim**0.5) @ w2 + 0.1 * torch.randn(n, 1, generator=own)
    return x, y


def make_model(dim=20, width=256):
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


class Ring:
    def __init__(self, rank, world):
        self.neighbours = sorted({(rank - 1) % world, (rank + 1) % world} - {rank})
        self.weight = 1.0 / (len(self.neighbours) + 1)

    def swap(self, flat, peer):
        received = torch.empty_like(flat)
        request = dist.isend(flat, dst=peer)
        dist.recv(received, src=peer)
        request.wait()
        return received

    @torch.no_grad()
    def mix(self, model):
        flat = parameters_to_vector(model.parameters())
        mixed = self.weight * flat
        for peer in self.neighbours:
            mixed += self.weight * self.swap(flat, peer)
        vector_to_parameters(mixed, model.parameters())


def spread(model, world):
    """How far the workers' weights are from their mean."""
    with torch.no_grad():
        flat = parameters_to_vector(model.parameters()).clone()
        mean = flat.clone()
        dist.all_reduce(mean)
        gap = (flat - mean / world).norm()
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return gap.item()


def worker(rank, world, port, args):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    x, y = sensor_data(rank, args.samples)
    ring = Ring(rank, world)
    order = torch.Generator().manual_seed(rank)

    for epoch in range(args.epochs):
        total, steps = torch.zeros(1), 0
        for idx in torch.randperm(len(x), generator=order).split(args.batch):
            loss = nn.functional.mse_loss(model(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ring.mix(model)
            total += loss.detach()
            steps += 1
        dist.all_reduce(total)
        gap = spread(model, world)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() / world / steps:.4f} spread {gap:.4f}", flush=True)

    with torch.no_grad():
        flat = parameters_to_vector(model.parameters()).clone()
        dist.all_reduce(flat)
        vector_to_parameters(flat / world, model.parameters())
    if rank == 0:
        torch.save(model.state_dict(), "consensus.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--world", type=int, default=2)
    ap.add_argument("--samples", type=int, default=640)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=8)
    args = ap.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(args.world, port, args), nprocs=args.world, join=True)


if __name__ == "__main__":
    main()
