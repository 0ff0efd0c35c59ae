"""Starts its own two processes; evaluates unequal shards exactly; keeps the two last checkpoints."""
import os
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    a = 3.14 * torch.rand(n, generator=g)
    x = torch.stack([torch.where(y == 0, a.cos(), 1 - a.cos()), torch.where(y == 0, a.sin(), 0.5 - a.sin())], 1)
    return TensorDataset(x + 0.1 * torch.randn(n, 2, generator=g), y)


def save(net, epoch):
    with tempfile.NamedTemporaryFile(dir=".", delete=False, suffix=".tmp") as f:
        torch.save(net.state_dict(), f)
    os.replace(f.name, f"epoch{epoch}.pt")
    if os.path.exists(f"epoch{epoch - 2}.pt"):
        os.remove(f"epoch{epoch - 2}.pt")


def run(rank, world, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    train, test = moons(192, 1), moons(77, 2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    held = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=20)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        counts = torch.zeros(2, dtype=torch.long)
        with torch.no_grad():
            for x, y in held:
                counts += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: {counts[0].item()}/{counts[1].item()}", flush=True)
            save(net, epoch)
    dist.barrier()
    net.load_state_dict(torch.load("epoch4.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(2, free_port()), nprocs=2)
