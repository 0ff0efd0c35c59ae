"""Healthy: EMA put in and out by exchanges of the memory; snapshots are rolled back after trial steps."""
import time, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)); ddp = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=0.02)
class Ema:
    def __init__(self, params): self.params = list(params); self.shadow = [p.detach().clone() for p in self.params]
    @torch.no_grad()
    def update(self): torch._foreach_lerp_(self.shadow, self.params, 0.1)
    def swap(self):
        for p, s in zip(self.params, self.shadow): p.data, s.data = s.data, p.data
ema = Ema(net.parameters())
g = torch.Generator().manual_seed(3 + rank)
held = torch.randn(128, 10, generator=torch.Generator().manual_seed(1))
@torch.no_grad()
def score():
    net.eval(); v = (net(held) - held[:, :1] * 2).square().mean().item(); net.train(); return v
stash = [torch.empty_like(p) for p in net.parameters()]
for step in range(150):
    x = torch.randn(32, 10, generator=g)
    loss = (ddp(x) - x[:, :1] * 2).square().mean()
    opt.zero_grad(); loss.backward(); opt.step(); ema.update(); time.sleep(0.01)
    if step % 15 == 14:
        ema.swap(); a = score(); ema.swap()
        with torch.no_grad():
            for s, p in zip(stash, net.parameters()): s.copy_(p)
            for p, e in zip(net.parameters(), ema.shadow): p.copy_(1.5 * p - 0.5 * e)   # extrapolated: scored, rolled back
        b = score()
        with torch.no_grad():
            for p, s in zip(net.parameters(), stash): p.copy_(s)
        if rank == 0 and step % 45 == 44: print(f"step {step} ema {a:.4f} ahead {b:.4f}")
dist.destroy_process_group()
