"""A slimmable network under torch.compile: each step trains one of eight widths. Eight programs are compiled once, in the first steps, and
are used from there on."""
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
torch._dynamo.config.recompile_limit = 16
WIDTHS = [8, 16, 24, 32, 40, 48, 56, 64]


class Slim(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = WIDTHS[-1]
        self.inp = nn.Linear(16, 64)
        self.mid = nn.Linear(64, 64)
        self.out = nn.Linear(64, 4)

    def forward(self, x):
        k = self.width
        h = torch.relu(nn.functional.linear(x, self.inp.weight[:k], self.inp.bias[:k]))
        h = torch.relu(nn.functional.linear(h, self.mid.weight[:k, :k], self.mid.bias[:k]))
        return nn.functional.linear(h, self.out.weight[:, :k], self.out.bias)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = Slim()
model = DDP(net)
forward = torch.compile(model, backend="aot_eager")
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
teacher = torch.randn(16, 4)
g = torch.Generator().manual_seed(rank + 1)
schedule = torch.Generator().manual_seed(0)           # the same width on all ranks
for step in range(160):
    if step % len(WIDTHS) == 0:
        order = torch.randperm(len(WIDTHS), generator=schedule).tolist()
    net.width = WIDTHS[order[step % len(WIDTHS)]]
    x = torch.randn(64, 16, generator=g)
    y = (x @ teacher).argmax(1)
    loss = nn.functional.cross_entropy(forward(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0 and step % 40 == 39:
        print(f"step {step} width {net.width} loss {loss.item():.4f}")
dist.destroy_process_group()
