"""LoRA on a frozen base, activation checkpointing, bf16 autocast; the adapters alone are saved by rank 0."""
import os, tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


class LoRA(nn.Module):
    def __init__(self, base, r=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + (x @ self.A.T) @ self.B.T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LoRA(nn.Linear(32, 32)) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(checkpoint(layer, x, use_reentrant=False)) + x
        return self.head(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(2048, 32)
data = TensorDataset(x, (x @ torch.randn(32, 4)).argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 64, sampler=sampler)
model = DDP(Net())
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(xb)
        loss = nn.functional.cross_entropy(logits.float(), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
if rank == 0:
    path = os.path.join(tempfile.mkdtemp(), "adapters.pt")
    torch.save({n: p for n, p in model.module.state_dict().items() if not n.endswith(("base.weight", "base.bias"))}, path)
dist.barrier()
dist.destroy_process_group()
