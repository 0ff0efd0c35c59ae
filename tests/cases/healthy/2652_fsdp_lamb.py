"""Healthy: FSDP2, LAMB by hand on shards: trust ratios from reduced norms; gradients pre-scaled per parameter by a reduced norm."""
import time, torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                w, gr = p.to_local(), p.grad.to_local()
                st = self.state[p]
                if not st: st["m"], st["v"], st["t"] = torch.zeros_like(w), torch.zeros_like(w), 0
                st["t"] += 1
                st["m"].lerp_(gr, 0.1); st["v"].lerp_(gr.square(), 0.01)
                u = (st["m"] / (1 - 0.9 ** st["t"])) / ((st["v"] / (1 - 0.99 ** st["t"])).sqrt() + 1e-6)
                norms = torch.stack([w.square().sum(), u.square().sum()])
                dist.all_reduce(norms)
                wn, un = norms.sqrt().tolist()
                w.add_(u, alpha=-group["lr"] * (wn / un if wn > 0 and un > 0 else 1.0))
net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
for layer in net:
    if isinstance(layer, nn.Linear): fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
opt = Lamb(net.parameters(), 0.02)
g = torch.Generator().manual_seed(3 + rank)
for step in range(120):
    x = torch.randn(32, 12, generator=g); y = x[:, :2].sin()
    loss = (net(x) - y).square().mean()
    opt.zero_grad(); loss.backward()
    grads = [p.grad.to_local() for p in net.parameters()]
    squares = torch.stack([s.square().sum() for s in grads])
    dist.all_reduce(squares)
    for s, n in zip(grads, squares.sqrt().tolist()): s.mul_(min(1.0, 0.1 / (n + 1e-8)))
    opt.step(); time.sleep(0.01)
t = loss.detach().clone(); dist.all_reduce(t)
if rank == 0: print(f"mean loss {t.item() / world:.4f}")
dist.destroy_process_group()
