"""PostLocalSGD: DDP's hook for the first steps, then the periodic model averager."""
import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
own, _ = dist.new_subgroups(group_size=1)
torch.manual_seed(0)
w = torch.randn(16, 4)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
model.register_comm_hook(PostLocalSGDState(process_group=None, subgroup=own, start_localSGD_iter=20), post_localSGD_hook)
opt = PostLocalSGDOptimizer(optim=torch.optim.SGD(model.parameters(), lr=0.1),
                            averager=averagers.PeriodicModelAverager(period=4, warmup_steps=20))
g = torch.Generator().manual_seed(30 + rank)
for step in range(100):
    x = torch.randn(32, 16, generator=g)
    loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0 and step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
