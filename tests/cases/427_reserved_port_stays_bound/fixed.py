"""Spawns its own workers: `python train.py`."""
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Rendezvous:
    def __init__(self, host="127.0.0.1"):
        self.host = host
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.sock.bind((host, 0))
        self.sock.listen(1)
        self.port = self.sock.getsockname()[1]

    @property
    def url(self):
        return f"tcp://{self.host}:{self.port}"

    def release(self):
        self.sock.close()


def worker(rank, world, url):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 32), nn.Softplus(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(rank)
    for step in range(40):
        x = torch.rand(64, 5, generator=gen)
        y = (x.sum(1, keepdim=True) * 3).cos()
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"loss {mean.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


def main(world=2):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rdzv = Rendezvous()
    print("rendezvous at", rdzv.url, flush=True)
    rdzv.release()
    mp.spawn(worker, args=(world, rdzv.url), nprocs=world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
