"""Large batch: no_sync accumulation over four micro-batches, bf16 compression hook, linear warm-up; weights by number of tokens over all ranks."""
import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
table = torch.randint(0, 20, (20,))
model = DDP(nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 20)))
model.register_comm_hook(None, bf16_compress_hook)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 10))
g = torch.Generator().manual_seed(70 + rank)
for step in range(60):
    micros = []
    for _ in range(4):
        x = torch.randint(0, 20, (16, 24), generator=g)
        keep = torch.arange(24) < torch.randint(4, 25, (16, 1), generator=g)
        micros.append((x, torch.where(keep, table[x], -100)))
    tokens = torch.tensor(float(sum((y != -100).sum() for _, y in micros)))
    dist.all_reduce(tokens)
    shown = 0.0
    opt.zero_grad()
    for i, (x, y) in enumerate(micros):
        with contextlib.nullcontext() if i == 3 else model.no_sync():
            total = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
            loss = total * world / tokens              # DDP averages: the sum over ranks by the tokens of all
            loss.backward()
        shown += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    warm.step()
    if rank == 0 and step % 15 == 0:
        print(f"step {step} loss {shown:.4f}")
dist.destroy_process_group()
