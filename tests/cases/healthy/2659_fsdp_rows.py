"""Healthy: FSDP2, vocabulary doubled for a new language: the old half's rows of both tables learn ten times slower."""
import time, torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
OLD, VOCAB, DIM = 32, 64, 16
class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB, bias=False)
    def forward(self, t): return self.out(torch.tanh(self.mix(self.table(t))))
net = Lm()
fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
rows = torch.where(torch.arange(VOCAB) < OLD, 0.1, 1.0)[:, None]
mine = rows.chunk(world)[rank]
g = torch.Generator().manual_seed(3 + rank)
for step in range(150):
    t = torch.randint(0, VOCAB, (64,), generator=g)
    loss = nn.functional.cross_entropy(net(t), (t * 7 + 3) % VOCAB)
    opt.zero_grad(); loss.backward()
    for p in (net.table.weight, net.out.weight): p.grad.to_local().mul_(mine)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step(); time.sleep(0.01)
v = loss.detach().clone(); dist.all_reduce(v)
if rank == 0: print(f"mean loss {v.item() / world:.4f}")
dist.destroy_process_group()
