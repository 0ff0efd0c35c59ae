"""Rank 0 keeps an average inside the wrapped module; a VQ codebook updated alike on all ranks; LoRA merged via .data and unmerged."""
import copy, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.ema = copy.deepcopy(self.net).requires_grad_(False)
        self.code = nn.Parameter(torch.randn(8, 16), requires_grad=False)
    def forward(self, x):
        idx = torch.cdist(x, self.code).argmin(1)
        q = self.code[idx]
        if self.training:
            with torch.no_grad():
                s = torch.zeros(8, 16).index_add_(0, idx, x); n = torch.zeros(8).index_add_(0, idx, torch.ones(len(x)))
                dist.all_reduce(s); dist.all_reduce(n)
                self.code.lerp_(torch.where(n[:, None] > 0, s / n.clamp(min=1)[:, None], self.code), 0.05)
        return self.net(x + 0.1 * q)

dist.init_process_group("gloo"); r = dist.get_rank(); torch.set_num_threads(1)
torch.manual_seed(0); task = Task(); model = DDP(task)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
g = torch.Generator().manual_seed(100 + r); W = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
view = copy.copy(task.net)
for step in range(120):
    x = torch.randn(32, 16, generator=g); y = (x @ W).argmax(1)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        if r == 0:
            for a, b in zip(task.ema.parameters(), task.net.parameters()): a.lerp_(b, 0.05)
        acc = (view(x).argmax(1) == y).float().mean()
    if step % 30 == 29:
        t = torch.stack([loss.detach(), acc]); dist.all_reduce(t)
        if r == 0:
            with torch.no_grad(): e = (task.ema(x).argmax(1) == y).float().mean()
            print(step, t / dist.get_world_size(), "rank 0's average on its batch", e.item(), flush=True)
dist.barrier(); dist.destroy_process_group()
