"""Recurrent regression with gradient clipping and callbacks around the step."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def adding_problem(n=384, length=14):
    """Sum of the two marked numbers."""
    g = torch.Generator().manual_seed(29)
    value = torch.rand(n, length, generator=g)
    mark = torch.zeros(n, length)
    first = torch.randint(0, length // 2, (n, 1), generator=g)
    second = torch.randint(length // 2, length, (n, 1), generator=g)
    mark.scatter_(1, first, 1.0).scatter_(1, second, 1.0)
    return TensorDataset(torch.stack([value, mark], 2), (value * mark).sum(1, keepdim=True))


class Adder(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.RNN(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class MeanGradients:
    def __init__(self, world):
        self.world = world

    def after_backward(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)


class ClipGradients:
    def __init__(self, max_norm):
        self.max_norm = max_norm

    def after_backward(self, model):
        clip_grad_norm_(model.parameters(), self.max_norm)


class Loop:
    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks

    def epoch(self, loader):
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            for callback in self.callbacks:
                callback.after_backward(self.model)
            self.optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--max-norm", type=float, default=0.2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(14)
    model = Adder()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = adding_problem()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    loop = Loop(model, optimizer, [MeanGradients(world), ClipGradients(args.max_norm)])
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = loop.epoch(loader)
        if rank == 0:
            print(f"epoch {epoch}: mse {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
