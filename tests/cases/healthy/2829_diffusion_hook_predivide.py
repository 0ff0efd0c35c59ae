import math

import torch
import torch.distributed as dist
import torch.nn as nn


class HookReducer:
    """Reduces each gradient from inside the backward of the last micro-batch."""

    def __init__(self, module):
        self.world, self.enabled, self.works = dist.get_world_size(), True, []
        self.pre = math.sqrt(self.world)
        self.post = self.world / self.pre
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        if self.enabled:
            p.grad.div_(self.pre)
            self.works.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish(self):
        for work, p in self.works:
            work.wait()
            p.grad.div_(self.post)
        self.works = []


class UNet1d(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(2, c), nn.SiLU(), nn.Linear(c, c))
        self.a = nn.Conv1d(1, c, 3, padding=1)
        self.d = nn.Conv1d(c, 2 * c, 4, stride=2, padding=1)
        self.m = nn.Sequential(nn.GroupNorm(4, 2 * c), nn.SiLU(), nn.Conv1d(2 * c, 2 * c, 3, padding=1))
        self.u = nn.ConvTranspose1d(2 * c, c, 4, stride=2, padding=1)
        self.o = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv1d(c, 1, 3, padding=1))

    def forward(self, x, sigma):
        e = self.t(torch.stack([sigma.log(), sigma], 1)).unsqueeze(2)
        h = self.a(x) + e
        d = torch.relu(self.d(h))
        return self.o(h + self.u(d + self.m(d)))


def waves(n, g):
    t = torch.linspace(0, 1, 32)
    f = 1 + 3 * torch.rand(n, 1, generator=g)
    ph = 6.28 * torch.rand(n, 1, generator=g)
    return torch.sin(6.28 * f * t + ph).unsqueeze(1)


def edm_loss(net, x, g, sd=0.7):
    sigma = torch.exp(-0.6 + 1.0 * torch.randn(len(x), generator=g))
    s = sigma.view(-1, 1, 1)
    noisy = x + s * torch.randn(x.shape, generator=g)
    c_skip = sd ** 2 / (s ** 2 + sd ** 2)
    c_out = s * sd / (s ** 2 + sd ** 2).sqrt()
    den = c_skip * noisy + c_out * net(noisy / (s ** 2 + sd ** 2).sqrt(), sigma)
    weight = (s ** 2 + sd ** 2) / (s * sd) ** 2
    return (weight * (den - x).pow(2)).mean()


@torch.no_grad()
def ema_update(avg, net, step):
    decay = min(0.99, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(avg.parameters()), list(net.parameters()), 1 - decay)


def main(steps=120, accum=3):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    net, avg = UNet1d(), UNet1d()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    avg.load_state_dict(net.state_dict())
    avg.requires_grad_(False)
    red = HookReducer(net)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-3, total_steps=steps)
    g = torch.Generator().manual_seed(800 + rank)
    for step in range(1, steps + 1):
        opt.zero_grad()
        acc = 0.0
        for m in range(accum):
            red.enabled = m == accum - 1
            loss = edm_loss(net, waves(24, g), g) / accum
            loss.backward()
            acc += loss.item()
        red.finish()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        ema_update(avg, net, step)
        if step % 30 == 0:
            with torch.no_grad():
                val = edm_loss(avg, waves(128, torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2))
            t = torch.tensor([acc])
            dist.all_reduce(t)
            if rank == 0:
                print(f"step {step} loss {t.item() / dist.get_world_size():.4f} ema valid {val.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
