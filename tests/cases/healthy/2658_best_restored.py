"""Healthy: at each drop of the learning rate the best weights so far are restored and scored once more, and training goes on from them."""
import time, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)); ddp = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=0.04, momentum=0.5)
held = torch.randn(128, 10, generator=torch.Generator().manual_seed(1))
@torch.no_grad()
def score():
    net.eval(); v = (net(held) - held[:, :1] * 2).square().mean().item(); net.train(); return v
best, best_score = [p.detach().clone() for p in net.parameters()], score()
g = torch.Generator().manual_seed(3 + rank)
for step in range(1, 201):
    x = torch.randn(16, 10, generator=g); y = x[:, :1] * 2 + 0.2 * torch.randn(16, 1, generator=g)
    loss = (ddp(x) - y).square().mean()
    opt.zero_grad(); loss.backward(); opt.step(); time.sleep(0.01)
    if step % 7 == 0 and (now := score()) < best_score:
        best_score = now
        with torch.no_grad():
            for b, p in zip(best, net.parameters()): b.copy_(p)
    if step % 40 == 0:                              # drop
        last = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p, b in zip(net.parameters(), best): p.copy_(b)
        moved = sum((p.detach() - l).square().sum() for p, l in zip(net.parameters(), last)).sqrt().item()
        opt.param_groups[0]["lr"] *= 0.6
        if rank == 0: print(f"step {step} back by {moved:.4f} to {score():.4f}, lr {opt.param_groups[0]['lr']:.4g}")
        else: score()
dist.destroy_process_group()
