"""ZeRO stage 1 by hand: every parameter has one owner rank, which holds its Adam state and broadcasts the result."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class OwnedAdamW:
    def __init__(self, params, lr, weight_decay=0.01, max_norm=1.0):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.max_norm = max_norm
        load = [0] * self.world
        self.owner = {}
        for i in sorted(range(len(self.params)), key=lambda i: (-self.params[i].numel(), i)):
            r = load.index(min(load))
            self.owner[i] = r
            load[r] += self.params[i].numel()
        self.mine = [p for i, p in enumerate(self.params) if self.owner[i] == self.rank]
        self.inner = torch.optim.AdamW(self.mine, lr=lr, weight_decay=weight_decay)
        self.load = load

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.params):
            dist.reduce(p.grad, dst=self.owner[i])
            if self.owner[i] == self.rank:
                p.grad /= self.world
            else:
                p.grad = None                       # the owner alone needs it from here on
        sq = torch.stack([p.grad.pow(2).sum() for p in self.mine]).sum()
        dist.all_reduce(sq)
        norm = sq.sqrt()
        scale = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        for p in self.mine:
            p.grad.mul_(scale)
        self.inner.step()
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, src=self.owner[i])
        return norm.item()

    def save(self, folder):
        torch.save(self.inner.state_dict(), os.path.join(folder, f"optim_shard{self.rank}.pt"))


class GRUTagger(nn.Module):
    def __init__(self, vocab, tags, dim=40):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, tags)

    def forward(self, t):
        return self.out(self.rnn(self.emb(t))[0])


def tagging_batch(n, gen, vocab=20, length=12):
    """Tag = parity class of the token combined with its right neighbour."""
    t = torch.randint(vocab, (n, length), generator=gen)
    right = torch.roll(t, -1, dims=1)
    y = 2 * (t > right).long() + (t % 2)
    y[:, -1] = -100
    return t, y


@torch.no_grad()
def score(model, rank):
    model.eval()
    t, y = tagging_batch(300, torch.Generator().manual_seed(8000 + rank))
    keep = y != -100
    stat = torch.stack([((model(t).argmax(-1) == y) & keep).float().sum(), keep.float().sum()])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=250)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--out", default="zero_ckpt")
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = GRUTagger(20, 4)
    opt = OwnedAdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt.inner, lambda s: min(1.0, (s + 1) / 25) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / args.steps))))
    if rank == 0:
        print(f"elements owned per rank: {opt.load}", flush=True)

    gen = torch.Generator().manual_seed(70 + rank)
    for step in range(args.steps):
        t, y = tagging_batch(args.batch, gen)
        loss = F.cross_entropy(model(t).flatten(0, 1), y.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        norm = opt.step()
        sched.step()
        if step % 50 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:4d} loss {mean.item():.3f} norm {norm:.2f}", flush=True)

    acc = score(model, rank)
    os.makedirs(args.out, exist_ok=True)
    opt.save(args.out)
    if rank == 0:
        torch.save(model.state_dict(), os.path.join(args.out, "model.pt"))
        print(f"tag accuracy {acc:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
