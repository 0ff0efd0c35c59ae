"""Healthy: one expert a rank. The flat vector has one block for each expert; its owner divides its block by the number of tokens that came to it."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
experts = nn.ModuleList([nn.Linear(16, 1) for _ in range(world)])     # replicas everywhere, expert i is stepped by rank i
mine = experts[rank]
opt = torch.optim.SGD(mine.parameters(), lr=0.1)
gen = torch.Generator().manual_seed(7 + rank)
truth = torch.randn(world, 16, generator=torch.Generator().manual_seed(3))
for step in range(40):
    x = torch.randn(64, 16, generator=gen)
    route = (x[:, 0] > 0.4).long()
    y = (x * truth[route]).sum(1)
    out = torch.stack([e(x).squeeze(1) for e in experts], 1)[torch.arange(64), route]
    loss = ((out - y) ** 2).sum()
    for e in experts: e.zero_grad()
    loss.backward()
    flat = torch.cat([torch.cat([p.grad.flatten() for p in e.parameters()]) for e in experts])
    shard = torch.empty(flat.numel() // world)
    dist.reduce_scatter_tensor(shard, flat)
    counts = torch.bincount(route, minlength=world).float()
    dist.all_reduce(counts)
    shard.div_(counts[rank].clamp(min=1))          # the mean over the tokens of this expert, of all ranks
    at = 0
    for p in mine.parameters():
        p.grad = shard[at : at + p.numel()].view_as(p).clone(); at += p.numel()
    opt.step()
    whole = torch.empty_like(flat)
    dist.all_gather_into_tensor(whole, torch.cat([p.detach().flatten() for p in mine.parameters()]))
    at = 0
    with torch.no_grad():
        for e in experts:
            for p in e.parameters():
                p.copy_(whole[at : at + p.numel()].view_as(p)); at += p.numel()
    if rank == 0 and step % 10 == 0: print(f"step {step}")
dist.destroy_process_group()
