"""DANN: a classifier on source data, a domain head behind a gradient reversal. Each has an optimizer; the one of the domain head is slowed
down (ReduceLROnPlateau, mode min) where it tells the domains apart better and better: it must not run away from the features."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.lam * grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.label_head = nn.Linear(32, 2)
        self.domain_head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, lam):
        z = self.features(x)
        return self.label_head(z), self.domain_head(Reverse.apply(z, lam)).squeeze(1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
w = torch.randn(16)
net = DDP(Net())
heads = list(net.module.domain_head.parameters())
ids = {id(p) for p in heads}
opt = torch.optim.Adam([p for p in net.parameters() if id(p) not in ids], lr=1e-3)
domain_opt = torch.optim.Adam(heads, lr=5e-4)
domain_schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(domain_opt, mode="min", factor=0.7, patience=2, min_lr=1e-5)
g = torch.Generator().manual_seed(7 + rank)
for epoch in range(8):
    right = torch.zeros(2)
    for _ in range(12):
        src = torch.randn(64, 16, generator=g)
        label = (src @ w > 0).long()
        tgt = torch.randn(64, 16, generator=g) * 1.3 + 0.8
        logits, dom = net(torch.cat([src, tgt]), 0.05)
        where = torch.cat([torch.zeros(64), torch.ones(64)])
        loss = nn.functional.cross_entropy(logits[:64], label) + nn.functional.binary_cross_entropy_with_logits(dom, where)
        opt.zero_grad()
        domain_opt.zero_grad()
        loss.backward()
        opt.step()
        domain_opt.step()
        right += torch.tensor([((dom > 0).float() == where).sum().item(), float(len(where))])
    dist.all_reduce(right)
    domain_acc = (right[0] / right[1]).item()
    domain_schedule.step(domain_acc)
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f} domain accuracy {domain_acc:.3f} lr {domain_opt.param_groups[0]['lr']:.2e}")
dist.destroy_process_group()
