"""Two-stage pipeline training with micro-batches, activations and gradients moved by send/recv."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

HIDDEN = 64
CLASSES = 6
FEATS = 20


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATS, HIDDEN)
        self.block = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU())

    def forward(self, x):
        h = self.embed(x)
        return h + self.block(h)


class Stage1(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, h):
        return self.head(h + self.block(h))


class Stream:
    """Both stages read the same stream: the first one needs the inputs, the last one the labels."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        task = torch.Generator().manual_seed(99)
        self.w1 = torch.randn(FEATS, 24, generator=task) / math.sqrt(FEATS)
        self.w2 = torch.randn(24, CLASSES, generator=task)

    def batch(self, n):
        x = torch.randn(n, FEATS, generator=self.gen)
        y = (torch.tanh(2 * x @ self.w1) @ self.w2).argmax(1)
        return x, y


def clip_across_stages(params, max_norm):
    sq = torch.stack([p.grad.pow(2).sum() for p in params]).sum()
    dist.all_reduce(sq)
    scale = torch.clamp(max_norm / (sq.sqrt() + 1e-6), max=1.0)
    for p in params:
        p.grad.mul_(scale)
    return sq.sqrt().item()


def train_step_first(model, x, n_micro):
    pending, outs = [], []
    for xm in x.chunk(n_micro):
        h = model(xm)
        outs.append(h)
        buf = h.detach().contiguous()
        pending.append((dist.isend(buf, dst=1), buf))
    for h in outs:
        g = torch.empty_like(h)
        dist.recv(g, src=1)
        h.backward(g)
    for work, _ in pending:
        work.wait()


def train_step_last(model, y, n_micro):
    total = 0.0
    for ym in y.chunk(n_micro):
        h = torch.empty(len(ym), HIDDEN)
        dist.recv(h, src=0)
        h.requires_grad_(True)
        loss = F.cross_entropy(model(h), ym) / n_micro
        loss.backward()
        dist.send(h.grad, dst=0)
        total += loss.item()
    return total


@torch.no_grad()
def evaluate(rank, model, n=1024):
    model.eval()
    x, y = Stream(seed=777).batch(n)
    acc = torch.zeros(1)
    if rank == 0:
        dist.send(model(x).contiguous(), dst=1)
    else:
        h = torch.empty(n, HIDDEN)
        dist.recv(h, src=0)
        acc[0] = (model(h).argmax(1) == y).float().mean()
    dist.broadcast(acc, src=1)
    model.train()
    return acc.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=450)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2, "this script has two stages"

    torch.manual_seed(10 + rank)
    model = Stage0() if rank == 0 else Stage1()
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.steps)
    stream = Stream(seed=5)

    for step in range(args.steps):
        x, y = stream.batch(args.batch)
        opt.zero_grad(set_to_none=True)
        loss = 0.0
        if rank == 0:
            train_step_first(model, x, args.micro)
        else:
            loss = train_step_last(model, y, args.micro)
        norm = clip_across_stages(params, 1.0)
        opt.step()
        sched.step()
        if rank == 1 and step % 75 == 0:
            print(f"step {step:4d} loss {loss:.3f} grad norm {norm:.2f}", flush=True)

    acc = evaluate(rank, model)
    os.makedirs("pipe_ckpt", exist_ok=True)
    torch.save({"stage": rank, "model": model.state_dict(), "optim": opt.state_dict()}, f"pipe_ckpt/stage{rank}.pt")
    dist.barrier()
    if rank == 0:
        print(f"held-out accuracy {acc:.3f}, stages saved: {sorted(os.listdir('pipe_ckpt'))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
