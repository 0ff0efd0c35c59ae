"""BYOL: an online network under DDP with SyncBatchNorm-free heads, and an EMA teacher that each rank keeps (equal, as the online weights are)."""
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16))
predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
teacher = copy.deepcopy(encoder).requires_grad_(False).eval()
online = DDP(nn.Sequential(encoder, predictor))
centers = torch.randn(10, 32)
data = TensorDataset((centers[torch.randint(0, 10, (1280,))] + 0.3 * torch.randn(1280, 32)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 64, sampler=sampler, drop_last=True)
torch.manual_seed(10 + rank)
opt = torch.optim.AdamW(online.parameters(), lr=1e-3)


def augment(x):
    return (x + 0.2 * torch.randn_like(x)) * (torch.rand_like(x) > 0.1)


for epoch in range(6):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        a, b = augment(x), augment(x)
        with torch.no_grad():
            t = teacher(torch.cat([b, a]))
        loss = 2 - 2 * F.cosine_similarity(online(torch.cat([a, b])), t).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), encoder.parameters()):
                p.lerp_(q, 0.02)
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
