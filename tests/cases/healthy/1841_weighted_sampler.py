"""A weighted sampler that draws the same list on all ranks (seed + epoch) and cuts it by rank."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.set_num_threads(1)


class ShardedWeighted(Sampler):
    def __init__(self, weights, num, rank, world):
        self.weights, self.num, self.rank, self.world, self.epoch = weights, num, rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        drawn = torch.multinomial(self.weights, self.num * self.world, replacement=True, generator=g)
        return iter(drawn[self.rank::self.world].tolist())

    def __len__(self):
        return self.num


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
y = (torch.rand(2000) < 0.1).long()
x = torch.randn(2000, 16) + y[:, None] * 0.8
weights = 1.0 / torch.bincount(y)[y].double()
sampler = ShardedWeighted(weights, 960, rank, world)
loader = DataLoader(TensorDataset(x, y), 32, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
