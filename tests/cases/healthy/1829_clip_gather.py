"""CLIP-like contrastive loss over the embeddings of all ranks, gathered with gradient."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, i, t):
        return F.normalize(self.image(i), dim=1), F.normalize(self.text(t), dim=1), self.scale.exp()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
to_image, to_text = torch.randn(8, 32), torch.randn(8, 24)
model = DDP(Towers())
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
g = torch.Generator().manual_seed(rank + 5)
for step in range(100):
    z = torch.randn(32, 8, generator=g)
    i, t, scale = model(z @ to_image, z @ to_text)
    all_i, all_t = torch.cat(dnn.all_gather(i)), torch.cat(dnn.all_gather(t))
    labels = torch.arange(len(i)) + rank * len(i)
    loss = (F.cross_entropy(scale * i @ all_t.T, labels) + F.cross_entropy(scale * t @ all_i.T, labels)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        model.module.scale.clamp_(max=4.6)
    if rank == 0 and step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
dist.destroy_process_group()
