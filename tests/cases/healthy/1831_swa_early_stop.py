"""SWA with update of batch statistics, SyncBatchNorm-free BN with broadcast buffers, early stopping agreed over the ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(3072, 20)
y = (x @ torch.randn(20, 3)).argmax(1)
train, val = TensorDataset(x[:2048], y[:2048]), TensorDataset(x[2048:], y[2048:])
sampler = DistributedSampler(train)
loader = DataLoader(train, 64, sampler=sampler)
val_loader = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False))
model = DDP(nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa, swa_schedule = AveragedModel(model.module), SWALR(opt, swa_lr=0.02, anneal_epochs=2)


@torch.no_grad()
def validate(net):
    net.eval()
    s = torch.zeros(2)
    for xb, yb in val_loader:
        s += torch.tensor([nn.functional.cross_entropy(net(xb), yb, reduction="sum").item(), float(len(xb))])
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[1]).item()


best, bad = float("inf"), 0
for epoch in range(12):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch >= 4:
        swa.update_parameters(model.module)
        swa_schedule.step()
    v = validate(model.module)
    best, bad = (v, 0) if v < best - 1e-4 else (best, bad + 1)
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f} val {v:.4f}")
    if bad >= 4:            # v is the same number on all ranks
        break
full = DataLoader(train, 256)
update_bn(full, swa)        # over the whole set on each rank: equal statistics
print(f"rank {rank} swa val {validate(swa):.4f}") if rank == 0 else validate(swa)
dist.destroy_process_group()
