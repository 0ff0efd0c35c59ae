"""Next-byte prediction; poor man's data loader over a binary file."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
batch_size, block_size = 24, 12
vocab, n_embd = 32, 24
max_iters, eval_interval, eval_iters = 120, 30, 5
learning_rate, weight_decay, grad_clip = 1e-2, 1e-2, 1.0
seed = 1337
# -----------------------------------------------------------------------------

dist.init_process_group("gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
seed_offset = ddp_rank
torch.manual_seed(seed)


def prepare(split, n, sequence_seed):
    """Bytes of a walk that mostly goes on by the sum of its last two steps."""
    g = torch.Generator().manual_seed(sequence_seed)
    jump = torch.rand(n, generator=g) < 0.1
    other = torch.randint(0, vocab, (n,), generator=g)
    walk = [1, 2]
    for k in range(2, n):
        walk.append(int(other[k]) if jump[k] else (walk[-1] + walk[-2]) % vocab)
    with open(f"{split}.bin", "wb") as f:
        f.write(bytes(walk))


def get_batch(split):
    data = torch.from_file(f"{split}.bin", dtype=torch.uint8, size=os.path.getsize(f"{split}.bin"))
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size].long() for i in ix.tolist()])
    y = torch.stack([data[i + 1 : i + 1 + block_size].long() for i in ix.tolist()])
    return x, y


class WindowMLP(nn.Module):
    """Two bytes of context are enough for this walk."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(vocab, n_embd)
        self.mlp = nn.Sequential(nn.Linear(2 * n_embd, 128), nn.GELU(), nn.Linear(128, vocab))

    def forward(self, x, y):
        e = self.emb(x)
        pair = torch.cat([F.pad(e, (0, 0, 1, 0))[:, :-1], e], dim=2)
        return F.cross_entropy(self.mlp(pair).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss(net):
    net.eval()
    out = torch.stack([net(*get_batch("val")) for _ in range(eval_iters)]).mean()
    dist.all_reduce(out)
    net.train()
    return out.item() / ddp_world_size


if master_process:
    prepare("train", 20_000, 1)
    prepare("val", 4_000, 2)
dist.barrier()

raw_model = WindowMLP()
model = DDP(raw_model)  # takes rank 0's weights
decay = [p for p in raw_model.parameters() if p.dim() >= 2]
nodecay = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}], lr=learning_rate)

t0 = time.time()
for iter_num in range(max_iters):
    if iter_num % eval_interval == 0:
        val = estimate_loss(raw_model)
        if master_process:
            print(f"iter {iter_num}: val loss {val:.4f}")
    loss = model(*get_batch("train"))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
final = estimate_loss(raw_model)
if master_process:
    print(f"final: val loss {final:.4f} after {time.time() - t0:.1f} s")
    torch.save({"model": raw_model.state_dict(), "iter_num": max_iters}, "ckpt.pt")
dist.barrier()
dist.destroy_process_group()
