"""No torchrun command: the script calls torch.distributed.launcher itself (n=1) and trains with 2 workers."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel as DDP


def entry(steps, lr):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    g = torch.Generator().manual_seed(rank)
    for i in range(steps):
        x = torch.randn(32, 6, generator=g)
        y = (x[:, :1] * x[:, 1:2]).tanh()
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    out = torch.tensor([loss.item()])
    dist.all_reduce(out)
    dist.destroy_process_group()
    return out.item() / world


if __name__ == "__main__":
    cfg = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id=f"t789_{os.getpid()}",
                       max_restarts=0, monitor_interval=0.5, start_method="spawn")
    result = elastic_launch(cfg, entry)(60, 0.05)
    print("final loss by rank:", {k: round(v, 4) for k, v in result.items()})
