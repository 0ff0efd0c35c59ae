"""FSDP2 fully_shard with torch.distributed.checkpoint: save in the middle, go on, load back, go on."""
import tempfile
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
w = torch.randn(16, 4)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2)], nn.Linear(16, 4))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
g = torch.Generator().manual_seed(10 + rank)


def train(num):
    for _ in range(num):
        x = torch.randn(32, 16, generator=g)
        loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"loss {mean.item() / world:.4f}")


train(30)
box = [tempfile.mkdtemp(prefix="dcp") if rank == 0 else None]
dist.broadcast_object_list(box, src=0)
m, o = get_state_dict(model, opt)
dcp.save({"model": m, "optim": o}, checkpoint_id=box[0])
train(10)
m, o = get_state_dict(model, opt)
state = {"model": m, "optim": o}
dcp.load(state, checkpoint_id=box[0])
set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
train(30)
dist.barrier()
if rank == 0:
    import shutil
    shutil.rmtree(box[0])
dist.destroy_process_group()
