"""Stage 1 trains a head on a frozen body; stage 2 wraps anew and trains all, layer-wise decayed rates, two optimizers."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
w = torch.randn(16, 4)
body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
head = nn.Linear(16, 4)
net = nn.Sequential(body, head)
g = torch.Generator().manual_seed(60 + rank)


def run(model, opts, num, name):
    for step in range(num):
        x = torch.randn(64, 16, generator=g)
        loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
        for o in opts:
            o.zero_grad()
        loss.backward()
        for o in opts:
            o.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"{name} loss {mean.item() / dist.get_world_size():.4f}")


body.requires_grad_(False)
run(DDP(net), [torch.optim.Adam(head.parameters(), lr=1e-2)], 40, "stage 1")
body.requires_grad_(True)
groups = [{"params": list(layer.parameters()), "lr": 3e-3 * 0.7 ** (len(body) - 1 - i)} for i, layer in enumerate(body)]
run(DDP(net), [torch.optim.AdamW(groups), torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)], 80, "stage 2")
dist.destroy_process_group()
