"""Healthy: the trained model, whose forward keeps its weights by copy_, is exported (strict) at the end, without eval()."""
import time, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.l = nn.Linear(8, 1); self.register_buffer("last", torch.zeros(1, 8))
    def forward(self, x):
        if x.shape[0] == 16: self.last.copy_(self.l.weight.detach())
        return self.l(x)
net = Net(); ddp = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.02)
g = torch.Generator().manual_seed(7 + dist.get_rank())
for step in range(60):
    x = torch.randn(16, 8, generator=g); y = x[:, :1] * 2
    loss = (ddp(x) - y).square().mean()
    opt.zero_grad(); loss.backward(); opt.step(); time.sleep(0.02)
t = loss.detach().clone(); dist.all_reduce(t)
if dist.get_rank() == 0:
    print("mean loss", t.item() / 2)
    ep = torch.export.export(net, (torch.ones(16, 8),), strict=True)
    print("exported", len(ep.graph.nodes))
dist.barrier()
dist.destroy_process_group()
