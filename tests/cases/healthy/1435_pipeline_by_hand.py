"""Two-stage pipeline with micro-batches, activations and gradients travel by send/recv."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

MICRO, SIZE, HIDDEN = 4, 8, 40


def source(step):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(MICRO * SIZE, 12, generator=g)
    return x.chunk(MICRO), (x[:, ::2].sum(1) > x[:, 1::2].sum(1)).long().chunk(MICRO)


class FirstStage:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(12, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())

    def step(self, xs, ys):
        kept = []
        for x in xs:
            h = self.net(x)
            dist.send(h.detach(), dst=1)
            kept.append(h)
        for h in kept:
            g = torch.empty_like(h)
            dist.recv(g, src=1)
            h.backward(g)
        return None


class LastStage:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))

    def step(self, xs, ys):
        kept, total = [], 0.0
        for y in ys:
            h = torch.empty(len(y), HIDDEN)
            dist.recv(h, src=0)
            h.requires_grad_()
            loss = nn.functional.cross_entropy(self.net(h), y) / MICRO
            kept.append((h, loss))
            total += loss.item()
        for h, loss in kept:
            loss.backward()
            dist.send(h.grad, dst=0)
        return total


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    stage = FirstStage() if rank == 0 else LastStage()
    opt = torch.optim.Adam(stage.net.parameters(), lr=3e-3)
    for step in range(80):
        loss = stage.step(*source(step))
        opt.step()
        opt.zero_grad()
        if loss is not None and step % 20 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    torch.save(stage.net.state_dict(), f"stage{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
