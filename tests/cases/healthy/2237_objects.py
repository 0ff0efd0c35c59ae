"""Federated averaging with client sampling and a server optimiser; two processes host twelve clients with unequal data."""
import collections
import copy
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

Settings = collections.namedtuple("Settings", "rounds clients fraction local_epochs batch client_lr server_lr server_momentum")
CONFIG = Settings(rounds=14, clients=12, fraction=0.4, local_epochs=2, batch=16, client_lr=0.05, server_lr=1.0, server_momentum=0.4)
CLASSES = 6


def client_data(index):
    """non-iid: a client sees three classes only and between 30 and 140 samples"""
    g = torch.Generator().manual_seed(900 + index)
    n = int(torch.randint(30, 141, (1,), generator=g))
    labels = torch.randperm(CLASSES, generator=g)[:3]
    y = labels[torch.randint(3, (n,), generator=g)]
    return prototypes()[y] + torch.randn(n, 20, generator=g), y


def prototypes():
    return 1.3 * torch.randn(CLASSES, 20, generator=torch.Generator().manual_seed(1))


def test_data(n=600):
    g = torch.Generator().manual_seed(2)
    y = torch.randint(CLASSES, (n,), generator=g)
    return prototypes()[y] + torch.randn(n, 20, generator=g), y


def build():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class Client:
    def __init__(self, index, cfg):
        self.x, self.y = client_data(index)
        self.cfg, self.rng = cfg, torch.Generator().manual_seed(index)

    def fit(self, server):
        model = copy.deepcopy(server)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.cfg.client_lr)
        loss_sum = 0.0
        for _ in range(self.cfg.local_epochs):
            for ids in torch.randperm(len(self.y), generator=self.rng).split(self.cfg.batch):
                loss = F.cross_entropy(model(self.x[ids]), self.y[ids])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.item() * len(ids)
        with torch.no_grad():
            update = [s - c for s, c in zip(server.parameters(), model.parameters())]
        return update, len(self.y), loss_sum / self.cfg.local_epochs


class Host:
    def __init__(self, rank, world, cfg):
        self.rank, self.world, self.cfg = rank, world, cfg
        self.clients = {i: Client(i, cfg) for i in range(cfg.clients) if i % world == rank}
        self.server = build()
        for p in self.server.parameters():
            dist.broadcast(p.data, src=0)
        self.optimizer = torch.optim.SGD(self.server.parameters(), lr=cfg.server_lr, momentum=cfg.server_momentum)

    def sample_clients(self, round_index):
        g = torch.Generator().manual_seed(4000 + round_index)          # same draw on all hosts
        return sorted(torch.randperm(self.cfg.clients, generator=g)[: int(self.cfg.fraction * self.cfg.clients)].tolist())

    def run_round(self, round_index):
        chosen = self.sample_clients(round_index)
        total = [torch.zeros_like(p) for p in self.server.parameters()]
        weight, loss = 0, 0.0
        for i in chosen:
            if i in self.clients:                                      # a host may have none this time
                update, n, client_loss = self.clients[i].fit(self.server)
                for t, u in zip(total, update):
                    t.add_(u, alpha=n)
                weight, loss = weight + n, loss + client_loss
        flat = torch.cat([t.flatten() for t in total] + [torch.tensor([float(weight), loss])])
        parcels = [None] * self.world
        dist.all_gather_object(parcels, flat)
        flat = sum(parcels)
        self.optimizer.zero_grad()
        offset = 0
        for p in self.server.parameters():
            p.grad = flat[offset:offset + p.numel()].view_as(p) / flat[-2]
            offset += p.numel()
        self.optimizer.step()
        return len([i for i in chosen if i in self.clients]), (flat[-1] / flat[-2]).item()


@torch.no_grad()
def accuracy(model):
    x, y = test_data()
    return (model(x).argmax(1) == y).float().mean().item()


def host_main(rank, world, port, cfg):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(5)
    host = Host(rank, world, cfg)
    for r in range(cfg.rounds):
        here, loss = host.run_round(r)
        if rank == 0:                                                  # the server model is the same everywhere, one test is enough
            host.server.eval()
            print(f"round {r:2d} clients here {here} client loss {loss:.4f} test accuracy {accuracy(host.server):.3f}", flush=True)
            host.server.train()
    if rank == 0:
        torch.save(host.server.state_dict(), "server.pt")
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    mp.spawn(host_main, args=(2, free_port(), CONFIG), nprocs=2, join=True)
