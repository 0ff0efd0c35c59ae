"""Asynchronous checkpoints by a writer thread on rank 0."""
import argparse
import os
import queue
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Writer(threading.Thread):
    def __init__(self, folder, pause=0.5):
        super().__init__(daemon=True)
        self.pause = pause  # the file server wants few writes a second
        self.folder, self.jobs = folder, queue.Queue()
        os.makedirs(folder, exist_ok=True)
        self.start()

    def run(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            step, state = job
            time.sleep(self.pause)
            tmp = os.path.join(self.folder, f"step{step}.tmp")
            torch.save({"step": step, "model": state}, tmp)
            os.replace(tmp, os.path.join(self.folder, f"step{step}.pt"))

    def submit(self, step, model):
        self.jobs.put((step, {k: v.detach() for k, v in model.state_dict().items()}))

    def close(self):
        self.jobs.put(None)
        self.join()


def fields(n=300):
    g = torch.Generator().manual_seed(58)
    k = torch.rand(n, 1, generator=g) * 3
    grid = torch.linspace(0, 6.28, 24)
    return TensorDataset((k * grid).sin(), (k * grid).cos())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--every", type=int, default=10)
    ap.add_argument("--width", type=int, default=600)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, args.width), nn.GELU(), nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, 24))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    writer = Writer("fields_ckpt") if rank == 0 else None
    data = fields()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 15, sampler=sampler)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if writer and step % args.every == 0:
                writer.submit(step, net)
            s += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch}: mse {s[0] / s[1]:.4f}")
    if writer:
        writer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
