"""The ranks pass their shards around a ring; each optimizer step accumulates one micro-batch of every shard, world_size of them.
The loss is divided by the number of accumulated micro-batches, which is world_size; DDP averages over the ranks."""
import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(11)
teacher = torch.randn(20, 3, generator=g)
own = torch.Generator().manual_seed(50 + rank)
x = torch.randn(1024, 20, generator=own)
y = (x @ teacher).argmax(1)


def rotate(xb, yb):
    """Hand this micro-batch to the right neighbour, take that of the left one."""
    rx, ry = torch.empty_like(xb), torch.empty_like(yb)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    ops = [dist.P2POp(dist.isend, xb, right), dist.P2POp(dist.isend, yb, right),
           dist.P2POp(dist.irecv, rx, left), dist.P2POp(dist.irecv, ry, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return rx, ry


torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 3)))
torch.manual_seed(1000 + rank)
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(4):
    order = torch.randperm(len(x), generator=own)
    running = 0.0
    for idx in order.split(32):
        xb, yb = x[idx].contiguous(), y[idx].contiguous()
        opt.zero_grad()
        for hop in range(world_size):
            last = hop == world_size - 1
            with contextlib.nullcontext() if last else model.no_sync():
                keep = torch.rand(len(xb), 1) > 0.05           # each rank sees the shard through its own noise
                loss = loss_fn(model(xb * keep), yb) / world_size   # mean over the hops
                loss.backward()
            running += loss.item()
            if not last:
                xb, yb = rotate(xb, yb)
        opt.step()
    if rank == 0:
        print(f"epoch {epoch} loss {running / (len(x) // 32):.4f}")
dist.destroy_process_group()
