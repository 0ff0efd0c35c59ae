# PCGrad ("gradient surgery"): per-task gradients by autograd.grad, each averaged over ranks by hand, projected, written to .grad.
# No DDP wrapper, no loss.backward() anywhere.
import random, torch, torch.distributed as dist
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.trunk = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU())
        s.cls, s.reg = nn.Linear(48, 3), nn.Linear(48, 1)

    def forward(s, x):
        h = s.trunk(x)
        return s.cls(h), s.reg(h).squeeze(1)


def averaged(grads):
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    return flat / dist.get_world_size()


def surgery(gs, rng):
    out = []
    for i, g in enumerate(gs):
        g = g.clone()
        others = [j for j in range(len(gs)) if j != i]
        rng.shuffle(others)
        for j in others:
            d = torch.dot(g, gs[j])
            if d < 0:
                g -= d / gs[j].norm().pow(2) * gs[j]
        out.append(g)
    return sum(out)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    net = Net()
    params = list(net.parameters())
    opt = torch.optim.Adam(params, lr=4e-3)
    rng = random.Random(0)                      # the same order on every rank
    g = torch.Generator().manual_seed(60 + rank)
    w1, w2 = [torch.randn(12, k, generator=torch.Generator().manual_seed(k)) for k in (3, 1)]
    ema = None
    for it in range(100):
        x = torch.randn(48, 12, generator=g)
        a, b = net(x)
        losses = [F.cross_entropy(a, (x @ w1).argmax(1)), F.smooth_l1_loss(b, (x @ w2).squeeze(1).tanh())]
        per_task = []
        for k, l in enumerate(losses):
            grads = torch.autograd.grad(l, params, retain_graph=k == 0, allow_unused=True)
            per_task.append(averaged([torch.zeros_like(p) if q is None else q for p, q in zip(params, grads)]))
        merged, o = surgery(per_task, rng), 0
        for p in params:
            p.grad = merged[o:o + p.numel()].view_as(p).clone()
            o += p.numel()
        opt.step()
        m = torch.stack([l.detach() for l in losses])
        dist.all_reduce(m)
        m /= world
        ema = m if ema is None else 0.9 * ema + 0.1 * m
        if rank == 0 and it % 25 == 24:
            print(f"{it + 1}: cls {ema[0]:.3f} reg {ema[1]:.3f}")
    dist.destroy_process_group()


main()
