"""IterableDataset with workers: each reader takes every n-th sample; the ranks have equal numbers of batches."""
import torch
import torch.distributed as dist
from itertools import islice
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.set_num_threads(1)


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world, self.epoch = rank, world, 0

    def __iter__(self):
        info = get_worker_info()
        n, i = (info.num_workers, info.id) if info else (1, 0)
        order = torch.randperm(2048, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for k in islice(order, self.rank * n + i, None, self.world * n):
            x = torch.randn(12, generator=torch.Generator().manual_seed(k))
            yield x, x.sum().sin()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
stream = Stream(rank, world)
loader = DataLoader(stream, batch_size=32, num_workers=2)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1)))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(4):
    stream.epoch = epoch
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
