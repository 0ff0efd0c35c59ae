"""Federated, personalised: the body is averaged by the clients' numbers of samples after each round, the head stays private to each client."""
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
head = nn.Linear(32, 3)
g = torch.Generator().manual_seed(40 + rank)
n = 512 + 128 * rank
x = torch.randn(n, 16, generator=g)
y = (x @ torch.randn(16, 3, generator=g)).argmax(1)       # each client has a task of its own
opt = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
for rnd in range(8):
    for idx in torch.randperm(n, generator=g)[:512].split(64):
        loss = nn.functional.cross_entropy(head(body(x[idx])), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        total = torch.tensor(float(n))
        dist.all_reduce(total)
        for p in body.parameters():
            p.mul_(n / total)
            dist.all_reduce(p)
    print(f"client {rank} round {rnd} loss {loss.item():.4f}")
dist.destroy_process_group()
