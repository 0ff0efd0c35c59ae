"""Own overlap of backward and communication: a hook per parameter starts an asynchronous all_reduce in bf16, the step waits for all of them."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Overlap:
    def __init__(self, module):
        self.module, self.world, self.flying, self.enabled = module, dist.get_world_size(), [], True
        for p in module.parameters():
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self.launch)

    def launch(self, p):
        if not self.enabled:
            return
        wire = (p.grad / self.world).to(torch.bfloat16)  # half the bytes
        self.flying.append((p, wire, dist.all_reduce(wire, async_op=True)))

    def finish(self):
        for p, wire, work in self.flying:
            work.wait()
            p.grad.copy_(wire)
        self.flying.clear()


class LaggedMean:
    """Averages a number over the ranks in the background; what it shows is one step old."""

    def __init__(self):
        self.work, self.buf, self.value = None, None, float("nan")

    def push(self, x):
        if self.work is not None:
            self.work.wait()
            self.value = self.buf.item() / dist.get_world_size()
        self.buf = x.detach().clone()
        self.work = dist.all_reduce(self.buf, async_op=True)
        return self.value

    def close(self):
        self.work.wait()
        self.work = None
        return self.buf.item() / dist.get_world_size()


class Residual(nn.Module):
    def __init__(self, d=48, depth=3):
        super().__init__()
        self.inp = nn.Linear(20, d)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d)) for _ in range(depth))
        self.out = nn.Linear(d, 4)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Residual()
    sync = Overlap(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(55)
    x = torch.randn(640, 20, generator=g)
    y = x.view(640, 4, 5).norm(dim=2).argmax(1)
    lagged, began = LaggedMean(), time.perf_counter()
    for epoch in range(4):
        perm = torch.randperm(len(x), generator=g)[rank::world]
        for k, idx in enumerate(perm.split(40)):
            halves = idx.split(20)
            opt.zero_grad()
            for j, part in enumerate(halves):
                sync.enabled = j == len(halves) - 1
                loss = F.cross_entropy(model(x[part]), y[part]) / len(halves)
                loss.backward()
            sync.finish()
            opt.step()
            shown = lagged.push(loss * len(halves))
            if rank == 0 and k % 4 == 3:
                print(f"[{time.perf_counter() - began:6.2f}s] epoch {epoch} step {k}: loss of the step before {shown:.4f}")
    last = lagged.close()
    if rank == 0:
        print(f"last {last:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
