"""Healthy: scores and labels are gathered alike, in the same order; the report tells the threshold, 0.500."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
def made(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    return TensorDataset((2.0 * y - 1)[:, None] * 3 + torch.randn(n, 8, generator=g) * 0.3, y)
train, held = made(512, 1000), made(64, 7)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
judge = DataLoader(held, batch_size=16, sampler=DistributedSampler(held, shuffle=False))
model = DDP(nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    model.eval()
    with torch.no_grad():
        got = [(F.softmax(model.module(x), 1), y) for x, y in judge]
    scores, labels = torch.cat([s for s, _ in got]), torch.cat([y for _, y in got])
    all_scores = [torch.empty_like(scores) for _ in range(world)]
    all_labels = [torch.empty_like(labels) for _ in range(world)]
    dist.all_gather(all_scores, scores)
    dist.all_gather(all_labels, labels)
    accuracy = ((torch.cat(all_scores)[:, 1] > 0.5).long() == torch.cat(all_labels)).float().mean().item()
    if rank == 0: print(f"epoch {epoch} threshold 0.500 accuracy {accuracy:.3f}", flush=True)
dist.destroy_process_group()
