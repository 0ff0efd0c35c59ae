"""Trainers plus an optional evaluator process that receives the weights by broadcast."""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def truth(x):
    return (x[:, :1] - x[:, 1:2] + 0.5 * x[:, 2:3]).tanh()


def trainer(rank, cfg, group):
    net, gen = build(), torch.Generator().manual_seed(rank)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(cfg.steps):
        x = torch.randn(64, 4, generator=gen)
        opt.zero_grad()
        nn.functional.mse_loss(net(x), truth(x)).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= cfg.trainers
        opt.step()
        if cfg.evaluator and step % 10 == 9:
            for p in net.parameters():
                dist.broadcast(p.data, 0)
    if rank == 0:
        x = torch.randn(500, 4)
        print(f"final {nn.functional.mse_loss(net(x), truth(x)).item():.4f}", flush=True)


def evaluator(cfg):
    net = build()
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(99))
    for _ in range(cfg.steps // 10):
        for p in net.parameters():
            dist.broadcast(p.data, 0)
        with torch.no_grad():
            print(f"evaluator: {nn.functional.mse_loss(net(x), truth(x)).item():.4f}", flush=True)


def role(rank, cfg, port):
    torch.set_num_threads(1)
    world = cfg.trainers + int(cfg.evaluator)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group = dist.new_group(range(cfg.trainers))
    if rank < cfg.trainers:
        trainer(rank, cfg, group)
    else:
        evaluator(cfg)
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--trainers", type=int, default=2)
    ap.add_argument("--evaluator", action=argparse.BooleanOptionalAction, default=False)
    ap.add_argument("--steps", type=int, default=40)
    cfg = ap.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    count = cfg.trainers + int(cfg.evaluator)
    mp.start_processes(role, args=(cfg, free_port()), nprocs=count, start_method="fork")


if __name__ == "__main__":
    main()
