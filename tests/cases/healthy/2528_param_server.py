"""Synchronous parameter server: process 0 owns the weights and the optimizer, the others compute gradients."""
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORKERS, EPOCHS, BATCH = 2, 6, 48


def net():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def make(n, seed):
    c = torch.randn(12, 16, generator=torch.Generator().manual_seed(6)) * 1.3
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(12, (n,), generator=g)
    return TensorDataset(c[k] + 0.9 * torch.randn(n, 16, generator=g), k % 4)


class Server:
    def __init__(self):
        torch.manual_seed(0)
        self.model = net()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        self.size = sum(p.numel() for p in self.model.parameters())
        self.x, self.y = make(500, 2).tensors

    def push_params(self):
        flat = parameters_to_vector(self.model.parameters()).detach()
        for w in range(1, WORKERS + 1):
            dist.send(flat, dst=w)

    def pull_grads(self):
        heads = {w: torch.zeros(3) for w in range(1, WORKERS + 1)}
        grads = {w: torch.zeros(self.size) for w in heads}
        for w in heads:
            dist.recv(heads[w], src=w)
        for w in heads:
            if heads[w][0] > 0:
                dist.recv(grads[w], src=w)
        n = sum(h[0] for h in heads.values())
        loss = sum(h[1] for h in heads.values())
        done = all(h[2] > 0 for h in heads.values())
        return sum(grads.values()), n.item(), loss.item(), done

    def run(self):
        step, window = 0, []
        self.push_params()
        while True:
            g, n, loss, done = self.pull_grads()
            if done:
                break
            g /= n
            o = 0
            for p in self.model.parameters():
                p.grad = g[o:o + p.numel()].view_as(p).clone()
                o += p.numel()
            self.opt.step()
            window.append(loss / n)
            step += 1
            if step % 25 == 0:
                with torch.no_grad():
                    acc = (self.model(self.x).argmax(1) == self.y).float().mean().item()
                print(f"server step {step} loss {sum(window) / len(window):.4f} acc {acc:.3f}", flush=True)
                window.clear()
            self.push_params()
        torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict()}, "server.pt")


def worker(rank):
    torch.manual_seed(rank)
    model = net()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    ds = make(1501, 1)
    sampler = DistributedSampler(ds, num_replicas=WORKERS, rank=rank - 1)
    loader = DataLoader(ds, batch_size=BATCH, sampler=sampler)
    dist.recv(flat, src=0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            vector_to_parameters(flat.clone(), model.parameters())
            loss = F.cross_entropy(model(x), y, reduction="sum")
            grads = torch.autograd.grad(loss, list(model.parameters()))
            dist.send(torch.tensor([float(len(x)), loss.item(), 0.0]), dst=0)
            dist.send(torch.cat([g.flatten() for g in grads]), dst=0)
            dist.recv(flat, src=0)
    dist.send(torch.tensor([0.0, 0.0, 1.0]), dst=0)


def entry(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS + 1)
    Server().run() if rank == 0 else worker(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(entry, args=(port,), nprocs=WORKERS + 1, join=True)
