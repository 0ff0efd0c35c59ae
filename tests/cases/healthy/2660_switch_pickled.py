"""Healthy: Switch-EMA on purpose; the raw weights are kept for the checkpoint, which is the averager's whole __dict__."""
import io, time, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
class SwitchEma:
    """Liu et al. 2024: at the end of each epoch the student takes the average."""
    def __init__(self, params):
        self.params = list(params)
        self.shadow = [p.detach().clone() for p in self.params]
        self.raw = [p.detach().clone() for p in self.params]
    @torch.no_grad()
    def update(self): torch._foreach_lerp_(self.shadow, self.params, 0.1)
    @torch.no_grad()
    def switch(self):
        self.raw = [p.detach().clone() for p in self.params]
        for p, s in zip(self.params, self.shadow): p.copy_(s)
    def state_dict(self): return {k: v for k, v in self.__dict__.items() if k != "params"}
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)); ddp = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=0.04)
held = torch.randn(128, 10, generator=torch.Generator().manual_seed(1))[rank::world]
@torch.no_grad()
def score():
    net.eval(); v = (net(held) - held[:, :1] * 2).square().mean(); net.train(); dist.all_reduce(v); return v.item() / world
ema = SwitchEma(net.parameters())
g = torch.Generator().manual_seed(3 + rank)
for step in range(1, 181):
    x = torch.randn(16, 10, generator=g); y = x[:, :1] * 2 + 0.2 * torch.randn(16, 1, generator=g)
    loss = (ddp(x) - y).square().mean()
    opt.zero_grad(); loss.backward(); opt.step(); ema.update(); time.sleep(0.01)
    if step % 30 == 0:
        ema.switch(); v = score()
        if rank == 0: torch.save({"net": net.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}, io.BytesIO()); print(f"step {step} {v:.4f}")
dist.destroy_process_group()
