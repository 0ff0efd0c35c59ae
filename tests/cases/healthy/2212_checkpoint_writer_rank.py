"""A spare rank writes checkpoints: the trainers never wait for the disk, rank 0 ships a copy of its state and goes on."""
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

TRAINERS, WRITER = 2, 2
STEPS, EVERY, KEEP = 120, 30, 2
DIM, BATCH = 20, 64
FOLDER = "checkpoints"


def build():
    return nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 6), nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, DIM))


def pack(model, optimizer, step):
    """One flat copy: step, parameters and Adam moments."""
    parts = [torch.tensor([float(step)])] + [p.detach().flatten() for p in model.parameters()]
    for key in ("exp_avg", "exp_avg_sq"):
        parts += [optimizer.state[p][key].flatten() for p in model.parameters()]
    return torch.cat(parts)


class Shipper:
    """At most one copy is under way; the buffer lives until it has arrived."""

    def __init__(self):
        self.work = self.buffer = None

    def ship(self, flat):
        self.flush()
        self.buffer = flat
        self.work = dist.isend(flat, dst=WRITER)

    def flush(self):
        if self.work is not None:
            self.work.wait()
            self.work = self.buffer = None


def train(rank, group):
    torch.manual_seed(0)
    model = build()
    for p in model.parameters():
        dist.broadcast(p.data, src=0, group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mixing = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(10 + rank)
    shipper = Shipper()
    for step in range(1, STEPS + 1):
        clean = torch.tanh(torch.randn(BATCH, 4, generator=draw) @ mixing)
        noisy = clean + 0.2 * torch.randn(BATCH, DIM, generator=draw)
        loss = F.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach().view(1)])
        dist.all_reduce(flat, group=group)
        flat /= TRAINERS
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
        optimizer.step()
        if rank == 0 and step % EVERY == 0:
            print(f"step {step}: loss {flat[-1].item():.4f}", flush=True)
            shipper.ship(pack(model, optimizer, step))
    shipper.flush()
    return model


def write_checkpoints():
    os.makedirs(FOLDER, exist_ok=True)
    size = sum(p.numel() for p in build().parameters())
    flat, kept = torch.empty(1 + 3 * size), []
    for _ in range(STEPS // EVERY):
        dist.recv(flat, src=0)
        step = int(flat[0].item())
        params, exp_avg, exp_avg_sq = flat[1:].split(size)
        path = os.path.join(FOLDER, f"step{step:05d}.pt")
        torch.save(dict(step=step, params=params.clone(), exp_avg=exp_avg.clone(), exp_avg_sq=exp_avg_sq.clone()),
                   path + ".tmp")
        os.replace(path + ".tmp", path)  # a reader never meets half a file
        time.sleep(0.1)  # a slow disk
        kept.append(path)
        while len(kept) > KEEP:
            os.remove(kept.pop(0))
        print(f"  [writer] {path}", flush=True)


def run(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TRAINERS + 1)
    group = dist.new_group(list(range(TRAINERS)))
    model = None
    if rank == WRITER:
        write_checkpoints()
    else:
        model = train(rank, group)
    dist.barrier()  # the last file is on disk now
    if rank == 0:
        saved = torch.load(os.path.join(FOLDER, f"step{STEPS:05d}.pt"), weights_only=True)
        same = torch.equal(saved["params"], nn.utils.parameters_to_vector(model.parameters()).detach())
        print(f"last checkpoint: step {saved['step']}, equal to the live model: {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free_port = s.getsockname()[1]
    mp.spawn(run, args=(free_port,), nprocs=TRAINERS + 1)
