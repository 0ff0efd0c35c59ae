"""GAN with two DDP models; the generator's step freezes the discriminator."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
G = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
D = DDP(nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)), broadcast_buffers=False)
torch.manual_seed(1 + rank)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
one, zero = torch.ones(64, 1), torch.zeros(64, 1)
for step in range(120):
    real = torch.randn(64, 2) * 0.3 + torch.tensor([1.5, -1.0])
    with torch.no_grad():
        fake = G.module(torch.randn(64, 8))
    both = D(torch.cat([real, fake]))
    loss_d = bce(both[:64], one) + bce(both[64:], zero)
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    for p in D.parameters():
        p.requires_grad_(False)
    loss_g = bce(D.module(G(torch.randn(64, 8))), one)
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    for p in D.parameters():
        p.requires_grad_(True)
    if rank == 0 and step % 30 == 0:
        print(f"step {step} loss_d {loss_d.item():.3f} loss_g {loss_g.item():.3f}")
dist.destroy_process_group()
