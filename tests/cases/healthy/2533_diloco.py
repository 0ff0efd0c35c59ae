"""Inner AdamW on every process, outer Nesterov step on the averaged displacement every H steps."""
import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """Endless sequences of a hidden third-order rule; every (rank, worker) has a stream of its own."""

    def __init__(self, rank, world, seed=0, length=24, vocab=16):
        self.rank, self.world, self.seed, self.length, self.vocab = rank, world, seed, length, vocab

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        g = torch.Generator().manual_seed(self.seed + 7919 * (self.rank * nw + wid))
        while True:
            s = torch.randint(self.vocab, (3,), generator=g).tolist()
            for _ in range(self.length - 2):
                nxt = (3 * s[-1] + 5 * s[-2] + s[-3]) % self.vocab
                if torch.rand((), generator=g) < 0.05:
                    nxt = int(torch.randint(self.vocab, (), generator=g))
                s.append(nxt)
            yield torch.tensor(s)


class LM(nn.Module):
    def __init__(self, vocab=16, d=32):
        super().__init__()
        self.e = nn.Embedding(vocab, d)
        self.mix = nn.Conv1d(d, 128, 4)
        self.out = nn.Sequential(nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, vocab))

    def forward(self, x):
        h = F.pad(self.e(x).transpose(1, 2), (3, 0))
        return self.out(self.mix(h).transpose(1, 2))


def lm_loss(model, seq):
    return F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())


class OuterOptimizer:
    def __init__(self, model, lr=0.7, momentum=0.8):
        self.model = model
        self.anchor = [p.detach().clone() for p in model.parameters()]
        self.opt = torch.optim.SGD(self.anchor, lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def step(self):
        world = dist.get_world_size()
        handles = []
        for a, p in zip(self.anchor, self.model.parameters()):
            a.grad = a - p
            handles.append(dist.all_reduce(a.grad, async_op=True))
        for h in handles:
            h.wait()
        spread = torch.zeros(1)
        for a in self.anchor:
            a.grad.div_(world)
            spread += a.grad.pow(2).sum()
        self.opt.step()
        for a, p in zip(self.anchor, self.model.parameters()):
            p.copy_(a)
        return spread.sqrt().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--outer", type=int, default=14)
    p.add_argument("--inner", type=int, default=20)
    p.add_argument("--batch", type=int, default=32)
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = LM()
    with torch.no_grad():
        for q in model.parameters():
            dist.broadcast(q, 0)
    outer = OuterOptimizer(model)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    total = a.outer * a.inner
    sched = torch.optim.lr_scheduler.LambdaLR(inner, lambda s: min(1, (s + 1) / 20) * (1 - 0.9 * s / total))
    it = iter(DataLoader(Stream(rank, world), batch_size=a.batch))
    held = next(iter(DataLoader(Stream(0, 1, seed=555_555), batch_size=128)))
    for o in range(a.outer):
        acc = torch.zeros(1)
        for _ in range(a.inner):
            loss = lm_loss(model, next(it))
            inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            sched.step()
            acc += loss.detach()
        delta = outer.step()
        dist.all_reduce(acc)
        if rank == 0:
            with torch.no_grad():
                val = lm_loss(model, held).item()
            print(f"round {o} inner loss {acc.item() / world / a.inner:.4f} val {val:.4f} |delta| {delta:.3f}")
    if rank == 0:
        torch.save({"model": model.state_dict(), "outer": outer.opt.state_dict()}, "diloco.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
