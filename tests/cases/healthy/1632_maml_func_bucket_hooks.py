"""Second-order MAML with torch.func (vmap over tasks), gradients reduced in buckets by own hooks.

Every rank draws its own tasks. A post-accumulate hook counts the ready gradients of a bucket and
starts an asynchronous all-reduce of the flat bucket when it is full; finish() waits and writes back.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

TASKS, SHOTS, INNER = 8, 10, 0.05


class Buckets:
    def __init__(self, params, world, limit=1200):
        self.world, self.pending = world, []
        self.buckets, cur, size = [], [], 0
        for p in reversed(list(params)):
            cur.append(p)
            size += p.numel()
            if size >= limit:
                self.buckets.append(cur)
                cur, size = [], 0
        if cur:
            self.buckets.append(cur)
        self.ready = [0] * len(self.buckets)
        for k, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda _, k=k: self._count(k))

    def _count(self, k):
        self.ready[k] += 1
        if self.ready[k] == len(self.buckets[k]):
            flat = torch.cat([p.grad.flatten() for p in self.buckets[k]])
            self.pending.append((k, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        assert len(self.pending) == len(self.buckets)
        for k, flat, work in self.pending:
            work.wait()
            at = 0
            for p in self.buckets[k]:
                p.grad.copy_(flat[at:at + p.numel()].view_as(p) / self.world)
                at += p.numel()
        self.pending.clear()
        self.ready = [0] * len(self.buckets)


def tasks(n, g):
    amp = 0.5 + 2.0 * torch.rand(n, 1, 1, generator=g)
    phase = 3.1416 * torch.rand(n, 1, 1, generator=g)
    x = torch.rand(n, 2 * SHOTS, 1, generator=g) * 6 - 3
    y = amp * torch.sin(x + phase)
    return x[:, :SHOTS], y[:, :SHOTS], x[:, SHOTS:], y[:, SHOTS:]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(18)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    params = dict(net.named_parameters())
    buckets = Buckets(net.parameters(), world)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def fit_loss(p, x, y):
        return F.mse_loss(functional_call(net, p, (x,)), y)

    def adapted(p, xs, ys, steps):
        for _ in range(steps):
            g = grad(fit_loss)(p, xs, ys)
            p = {k: p[k] - INNER * g[k] for k in p}
        return p

    def task_loss(p, xs, ys, xq, yq, steps=2):
        return fit_loss(adapted(p, xs, ys, steps), xq, yq)

    def score(steps):
        batch = tasks(100, torch.Generator().manual_seed(9000 + rank))
        with torch.no_grad():
            loss = vmap(lambda a, b, c, d: task_loss(params, a, b, c, d, steps))(*batch).mean()
        dist.all_reduce(loss)
        return loss.item() / world

    rng = torch.Generator().manual_seed(80 + rank)
    start = score(2)
    for it in range(300):
        loss = vmap(lambda a, b, c, d: task_loss(params, a, b, c, d))(*tasks(TASKS, rng)).mean()
        opt.zero_grad()
        loss.backward()
        buckets.finish()
        opt.step()
        if rank == 0 and it % 75 == 74:
            print(f"iteration {it} query loss {loss.item():.4f}", flush=True)
    no_step, two_steps = score(0), score(2)
    if rank == 0:
        print(f"before meta-training {start:.3f}; after: unadapted {no_step:.3f}, adapted {two_steps:.3f}")
        torch.save(net.state_dict(), "maml.pt")
    assert two_steps < 0.7 * no_step and two_steps < start
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
