"""Two pipeline stages by isend/recv, four micro-batches in 1F1B order; each rank owns half of the network."""
import os
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

MICRO, CHUNKS, WIDTH, CLASSES = 8, 4, 40, 4


def build_stage(rank):
    torch.manual_seed(10 + rank)
    if rank == 0:
        return nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))


class FirstStage:
    def __init__(self, net, peer):
        self.net, self.peer, self.pending = net, peer, deque()

    def forward(self, x):
        out = self.net(x)
        work = dist.isend(out.detach().contiguous(), self.peer)
        self.pending.append((out, work))

    def backward(self):
        out, work = self.pending.popleft()
        work.wait()
        grad = torch.empty_like(out)
        dist.recv(grad, self.peer)
        out.backward(grad)

    def step(self, xs):
        warmup = 2
        for x in xs[:warmup]:
            self.forward(x)
        for x in xs[warmup:]:
            self.backward()
            self.forward(x)
        while self.pending:
            self.backward()


class LastStage:
    def __init__(self, net, peer):
        self.net, self.peer = net, peer

    def step(self, ys):
        total = 0.0
        for y in ys:
            act = torch.empty(MICRO, WIDTH)
            dist.recv(act, self.peer)
            act.requires_grad_()
            loss = F.cross_entropy(self.net(act), y) / CHUNKS
            loss.backward()
            dist.send(act.grad, self.peer)
            total += loss.item()
        return total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2, "two stages"
    net = build_stage(rank)
    # the stages may have different settings: the head learns faster
    opt = torch.optim.Adam(net.parameters(), lr=1e-3 if rank == 0 else 3e-3)
    stage = FirstStage(net, 1) if rank == 0 else LastStage(net, 0)
    g = torch.Generator().manual_seed(2)  # both stages see the same order: one has the inputs, the other the labels
    x = torch.randn(512, 16, generator=g)
    y = x.view(512, 4, 4).sum(2).argmax(1)
    for epoch in range(4):
        losses = []
        for idx in torch.randperm(512, generator=g).split(MICRO * CHUNKS):
            opt.zero_grad()
            if rank == 0:
                stage.step(x[idx].split(MICRO))
            else:
                losses.append(stage.step(y[idx].split(MICRO)))
            opt.step()
        if rank == 1:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}", flush=True)
    parts = [None, None]
    dist.all_gather_object(parts, {f"stage{rank}.{k}": v for k, v in net.state_dict().items()})
    if rank == 0:
        full = {**parts[0], **parts[1]}
        print(f"whole network: {sum(v.numel() for v in full.values())} numbers in {len(full)} tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
