"""Curve fitting with early stopping: rank 0 validates and decides, all ranks follow."""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def sample(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 1, generator=g) - 1
    return x, torch.sin(5 * x) + 0.5 * torch.randn(n, 1, generator=g)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, float("inf"), 0, None

    def update(self, value, net):
        if value < self.best:
            self.best, self.bad = value, 0
            self.state = net.state_dict()
        else:
            self.bad += 1
        return self.bad >= self.patience


class Runner:
    def __init__(self, epochs=60, batch=8, lr=5e-3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epochs, self.batch = epochs, batch
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(1, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.train, self.valid = sample(64, 1), sample(200, 2)
        self.stopper = EarlyStopping(patience=12)

    def share_gradients(self):
        grads = [p.grad for p in self.net.parameters()]
        flat = parameters_to_vector(grads)
        dist.all_reduce(flat)
        vector_to_parameters(flat / self.world, grads)

    def epoch(self, number):
        x, y = self.train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        total = torch.zeros(())
        for idx in order[self.rank :: self.world].split(self.batch):
            loss = nn.functional.mse_loss(self.net(x[idx]), y[idx])
            self.opt.zero_grad()
            loss.backward()
            self.share_gradients()
            self.opt.step()
            total += loss.detach() * len(idx)
        dist.all_reduce(total)
        return total.item() / len(x)

    @torch.no_grad()
    def validation_loss(self):
        self.net.eval()
        value = nn.functional.mse_loss(self.net(self.valid[0]), self.valid[1]).item()
        self.net.train()
        return value

    def run(self):
        stop = torch.zeros(1)
        for number in range(self.epochs):
            loss = self.epoch(number)
            if self.rank == 0:
                val = self.validation_loss()
                stop.fill_(float(self.stopper.update(val, self.net)))
                if number % 10 == 9 or stop:
                    print(f"epoch {number}: train {loss:.4f}, validation {val:.4f}, best {self.stopper.best:.4f}", flush=True)
            dist.broadcast(stop, src=0)
            if stop:
                break
        if self.rank == 0:
            self.net.load_state_dict(self.stopper.state)
            torch.save(self.net.state_dict(), "best.pt")
            print(f"restored: validation {self.validation_loss():.4f}, best {self.stopper.best:.4f}", flush=True)
        for p in self.net.parameters():
            dist.broadcast(p.detach(), src=0)


if __name__ == "__main__":
    dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
    Runner().run()
    dist.destroy_process_group()
