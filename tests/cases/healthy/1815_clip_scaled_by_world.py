"""Gradient clipping whose limit shrinks with the root of the global batch, and a log of the mean squared norm over the ranks."""
import math
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
CLIP_PER_WORKER = 0.5
# noise of the averaged gradient falls with sqrt(ranks): so does the limit that was tuned on one process
max_norm = CLIP_PER_WORKER / math.sqrt(world)
torch.manual_seed(0)
true = torch.randn(32, 8)
model = DDP(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8)))
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
g = torch.Generator().manual_seed(10 + rank)
for step in range(120):
    x = torch.randn(32, 32, generator=g)
    y = x @ true
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    with torch.no_grad():
        square = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        dist.all_reduce(square)               # for the log: equal on all ranks unless a replica has drifted
        norm_rms = (square / world).sqrt()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    opt.step()
    if rank == 0 and step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} grad norm {norm_rms:.3f}")
dist.destroy_process_group()
