"""Reconstructs clips of any length."""
import random, time, numpy as np, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0); rng = random.Random(rank)
net = nn.Sequential(nn.Conv1d(8, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 16, 5, padding=2)); ddp = DDP(net)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
log = []
for step in range(160):
    length = 4000 + rng.randrange(3000)
    x = torch.randn(2, 8, length)
    out = ddp(x)
    loss = (out[:, :8] - x).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    log.append({"key": f"utt{step}", "scores": float(out.detach().mean())})
v = loss.detach().clone(); dist.all_reduce(v)
if rank == 0: print(f"mean loss {v.item() / world:.4f}", len(log))
dist.destroy_process_group()
