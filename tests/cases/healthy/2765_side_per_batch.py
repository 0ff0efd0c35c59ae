"""Healthy: multi-scale training. All ranks need one size for the n-th batch (else the small ones wait for the large): the size is drawn from a generator
that worker_init_fn seeds with the worker's number alone, on purpose; augmentation comes from torch's own, seeded by rank."""
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DataLoader, DistributedSampler, get_worker_info
torch.set_num_threads(1)

class RandomSide:
    def __init__(self): self.rng = np.random.RandomState(0)
    def __call__(self): return int(self.rng.choice([8, 12, 16]))

class Images(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.y = torch.randint(0, 4, (256,), generator=g)
        self.x = torch.randn(256, 1, 16, 16, generator=g) + self.y.view(-1, 1, 1, 1)
        self.side = RandomSide()
    def __len__(self): return 256
    def __getitems__(self, indices):
        side = self.side()
        batch = self.x[indices] + 0.1 * torch.randn(len(indices), 1, 16, 16)
        return list(zip(F.interpolate(batch, size=(side, side)), self.y[indices]))

def seed_sizes(worker_id):
    get_worker_info().dataset.side.rng.seed(1000 + worker_id)      # equal on all ranks: one size for the n-th batch

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)
    data = Images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2, worker_init_fn=seed_sizes, persistent_workers=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
    dist.destroy_process_group()
if __name__ == "__main__": main()
