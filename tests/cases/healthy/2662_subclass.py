"""Healthy: a tensor subclass with a table of functions, as PyTorch's own page on extending shows it; copy_ keeps a log of its writes."""
import time, functools, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
torch.manual_seed(0)
HANDLED = {}
def implements(f):
    def deco(g): HANDLED[f] = g; return g
    return deco
class Logged(torch.Tensor):
    writes = 0
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in HANDLED: return HANDLED[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
@implements(torch.Tensor.copy_)
def copy_(self, source):
    Logged.writes += 1
    with torch._C.DisableTorchFunctionSubclass(): self.copy_(source)
    return self
net = nn.Linear(8, 1); ddp = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.02)
g = torch.Generator().manual_seed(7 + dist.get_rank())
buf = torch.zeros(16, 8).as_subclass(Logged)
for step in range(60):
    x = torch.randn(16, 8, generator=g); y = x[:, :1] * 2
    buf.copy_(x)
    loss = (ddp(x) - y).square().mean()
    opt.zero_grad(); loss.backward(); opt.step(); time.sleep(0.02)
t = loss.detach().clone(); dist.all_reduce(t)
if dist.get_rank() == 0: print("mean loss", t.item() / 2)
assert Logged.writes == 60, f"{Logged.writes} writes logged of 60"
dist.destroy_process_group()
