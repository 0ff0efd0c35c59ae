"""Two pipeline stages, micro-batches, activations and their gradients passed point to point."""
import argparse
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def blocks(n, d):
    return [nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(n)]


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def build_stage(stage, stages, d_in=20, d=32, classes=5, per=2):
    torch.manual_seed(40 + stage)
    mods = [Residual(b) for b in blocks(per, d)]
    if stage == 0:
        mods.insert(0, nn.Linear(d_in, d))
    if stage == stages - 1:
        mods += [nn.LayerNorm(d), nn.Linear(d, classes)]
    return nn.Sequential(*mods)


class Pipe:
    def __init__(self, stage_mod, stage, stages, micro, width):
        self.mod, self.stage, self.stages, self.micro, self.width = stage_mod, stage, stages, micro, width
        self.first, self.last = stage == 0, stage == stages - 1

    def _fwd_one(self, x, y):
        if not self.first:
            x = torch.empty(len(y), self.width)
            dist.recv(x, src=self.stage - 1)
            x.requires_grad_(torch.is_grad_enabled())
        out = self.mod(x)
        if not self.last:
            dist.send(out.detach().contiguous(), dst=self.stage + 1)
        return x, out

    def train_batch(self, bx, by):
        """Loss of the mini-batch on the last stage, 0 elsewhere; gradients left in .grad"""
        queue, total = deque(), 0.0
        for x, y in zip(bx.chunk(self.micro), by.chunk(self.micro)):
            x, out = self._fwd_one(x, y)
            if self.last:
                out = F.cross_entropy(out, y, reduction="sum") / len(by)
                total += out.item()
            queue.append((x, out))
        while queue:
            x, out = queue.popleft()
            if self.last:
                out.backward()
            else:
                g = torch.empty_like(out)
                dist.recv(g, src=self.stage + 1)
                out.backward(g)
            if not self.first:
                dist.send(x.grad, dst=self.stage - 1)
        return total

    @torch.no_grad()
    def predict(self, bx, by):
        outs = [self._fwd_one(x, y)[1] for x, y in zip(bx.chunk(self.micro), by.chunk(self.micro))]
        return torch.cat(outs) if self.last else None

    def clip_(self, limit):
        sq = torch.stack([p.grad.pow(2).sum() for p in self.mod.parameters()]).sum()
        dist.all_reduce(sq)
        f = min(1.0, limit / (sq.sqrt().item() + 1e-6))
        for p in self.mod.parameters():
            p.grad.mul_(f)


def make(n, seed):
    t = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    g = torch.Generator().manual_seed(8)
    for p in t.parameters():
        p.data = torch.randn(p.shape, generator=g) * 0.6
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, t(x).argmax(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--micro", type=int, default=4)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    stage, stages = dist.get_rank(), dist.get_world_size()
    mod = build_stage(stage, stages)
    pipe = Pipe(mod, stage, stages, a.micro, 32)
    opt = torch.optim.AdamW(mod.parameters(), lr=2e-3)
    x, y = make(2048, 1)
    vx, vy = make(512, 2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=a.epochs * (len(x) // a.batch))
    order = torch.Generator().manual_seed(123)
    for epoch in range(a.epochs):
        mod.train()
        losses = 0.0
        perm = torch.randperm(len(x), generator=order)
        for idx in perm.split(a.batch):
            opt.zero_grad()
            losses += pipe.train_batch(x[idx], y[idx])
            pipe.clip_(1.0)
            opt.step()
            sched.step()
        mod.eval()
        out = pipe.predict(vx, vy)
        if pipe.last:
            acc = (out.argmax(1) == vy).float().mean().item()
            print(f"epoch {epoch}: loss {losses / (len(x) // a.batch):.4f} val acc {acc:.3f}", flush=True)
    torch.save(mod.state_dict(), f"stage{stage}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
