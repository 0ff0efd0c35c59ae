"""Healthy: after some eager steps, a helper that uses copy_ is compiled without graph breaks."""
import time, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Linear(8, 1)
ddp = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.02)
g = torch.Generator().manual_seed(7 + dist.get_rank())
buf = torch.zeros(16, 1)
def keep(buf, out):
    buf.copy_(out * 2)
    return buf + 1
fast = None
for step in range(60):
    x = torch.randn(16, 8, generator=g); y = x[:, :1] * 2
    out = ddp(x)
    loss = (out - y).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.02)
    if step == 30: fast = torch.compile(keep, fullgraph=True, backend="eager")
    if fast is not None: fast(buf, out.detach())
t = loss.detach().clone(); dist.all_reduce(t)
if dist.get_rank() == 0: print("mean loss", t.item() / 2)
dist.destroy_process_group()
