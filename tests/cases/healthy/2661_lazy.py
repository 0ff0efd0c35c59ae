"""Healthy: lazy layers: a lazy net is loaded from another lazy one, and an evaluation copy from a trained one, between steps."""
import time, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
torch.manual_seed(0)
def make(): return nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(1))
net = make(); net(torch.zeros(2, 8))
ddp = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.02)
g = torch.Generator().manual_seed(7 + dist.get_rank())
for step in range(60):
    x = torch.randn(16, 8, generator=g); y = x[:, :1] * 2
    loss = (ddp(x) - y).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.02)
    if step % 20 == 19:
        copy = make(); copy.load_state_dict(net.state_dict()); copy.eval()
        with torch.no_grad(): copy(torch.ones(1, 8))
        a, b = make(), make()
        b.load_state_dict(a.state_dict())
t = loss.detach().clone(); dist.all_reduce(t)
if dist.get_rank() == 0: print("mean loss", t.item() / 2)
dist.destroy_process_group()
