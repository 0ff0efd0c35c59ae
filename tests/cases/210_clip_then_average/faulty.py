"""Adding problem with an LSTM; gradients are averaged by a small helper instead of DDP."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class HParams:
    steps: int = 40
    batch: int = 16
    length: int = 12
    hidden: int = 24
    lr: float = 5e-3
    max_norm: float = 0.2
    log_every: int = 10


def adding_batch(hp, step, rank):
    g = torch.Generator().manual_seed(step * 64 + rank)
    values = torch.rand(hp.batch, hp.length, generator=g)
    marks = torch.zeros(hp.batch, hp.length)
    first = torch.randint(0, hp.length // 2, (hp.batch,), generator=g)
    second = torch.randint(hp.length // 2, hp.length, (hp.batch,), generator=g)
    rows = torch.arange(hp.batch)
    marks[rows, first] = 1
    marks[rows, second] = 1
    return torch.stack([values, marks], -1), (values * marks).sum(1, keepdim=True)


class Adder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.lstm = nn.LSTM(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def broadcast_parameters(module, src=0):
    for t in list(module.parameters()) + list(module.buffers()):
        dist.broadcast(t.data, src)


def average_gradients(module):
    world = dist.get_world_size()
    for p in module.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad.div_(world)


def main(hp: HParams):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    net = Adder(hp.hidden)
    broadcast_parameters(net)
    opt = torch.optim.Adam(net.parameters(), lr=hp.lr)
    history = []
    for step in range(hp.steps):
        x, y = adding_batch(hp, step, rank)
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), hp.max_norm)
        average_gradients(net)
        opt.step()
        history.append(loss.item())
        if (step + 1) % hp.log_every == 0:
            recent = torch.tensor(history[-hp.log_every :]).mean()
            dist.all_reduce(recent)
            if rank == 0:
                print(f"step {step + 1} mse {recent.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(HParams())
