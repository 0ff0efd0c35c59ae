"""Bilevel: per-class loss weights are learned on a clean validation batch through one virtual step (autograd.grad twice); both levels are averaged."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.func import functional_call

C = 4


def allmean(ts):
    flat = torch.cat([t.detach().reshape(-1) for t in ts])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    out, o = [], 0
    for t in ts:
        out.append(flat[o:o + t.numel()].view_as(t)); o += t.numel()
    return out


class Noisy:
    def __init__(self, seed):
        self.c = torch.randn(C, 10, generator=torch.Generator().manual_seed(0))
        self.g = torch.Generator().manual_seed(seed)

    def draw(self, n, noise):
        y = torch.randint(C, (n,), generator=self.g)
        x = self.c[y] + 0.9 * torch.randn(n, 10, generator=self.g)
        flip = torch.rand(n, generator=self.g) < noise
        return x, torch.where(flip & (y == 1), torch.zeros_like(y), y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, C))
    logw = torch.zeros(C, requires_grad=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    hyper = torch.optim.Adam([logw], lr=0.05)
    train, val = Noisy(10 + rank), Noisy(90 + rank)
    names = [n for n, _ in net.named_parameters()]
    for it in range(60):
        x, y = train.draw(32, 0.5)
        w = C * logw.softmax(0)
        params = dict(net.named_parameters())
        inner = (F.cross_entropy(net(x), y, reduction="none") * w[y]).mean()
        gs = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * g for n, p, g in zip(names, params.values(), gs)}
        vx, vy = val.draw(32, 0.0)
        outer = F.cross_entropy(functional_call(net, fast, (vx,)), vy)
        hg, = torch.autograd.grad(outer, logw)
        logw.grad, = allmean([hg])
        hyper.step()
        loss = (F.cross_entropy(net(x), y, reduction="none") * (C * logw.detach().softmax(0))[y]).mean()
        opt.zero_grad()
        loss.backward()
        for p, g in zip(net.parameters(), allmean([p.grad for p in net.parameters()])):
            p.grad.copy_(g)
        opt.step()
        if it % 20 == 19:
            m, = allmean([outer.view(1)])
            if rank == 0:
                print(f"{it + 1} val {m.item():.3f} w {[round(v, 2) for v in (C * logw.softmax(0)).tolist()]}")
    dist.destroy_process_group()


main()
