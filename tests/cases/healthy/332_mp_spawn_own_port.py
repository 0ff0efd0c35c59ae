# nproc: 1 (the script starts its own two processes)
"""Started with plain python: mp.spawn, a free port of our own, a world of two."""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ddp_setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, train_data, sampler, optimizer, gpu_id):
        self.gpu_id = gpu_id
        self.train_data, self.sampler, self.optimizer = train_data, sampler, optimizer
        self.model = DDP(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        losses = [self._run_batch(s, t) for s, t in self.train_data]
        print(f"[RANK{self.gpu_id}] Epoch {epoch} | Steps: {len(self.train_data)} | local loss {sum(losses) / len(losses):.4f}", flush=True)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main(rank, world_size, port, total_epochs, batch_size):
    ddp_setup(rank, world_size, port)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=g)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    torch.manual_seed(0)
    model = nn.Linear(20, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=sampler)
    Trainer(model, loader, sampler, optimizer, rank).train(total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(main, args=(world_size, free_port(), 4, 16), nprocs=world_size)
