"""nanoGPT-like: random crops of a token stream, gradient accumulation with require_backward_grad_sync, cosine schedule, loss estimate on all ranks."""
import math, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = rank == 0
batch_size, block_size, n_embd, vocab = 8, 32, 48, 32
gradient_accumulation_steps = 4
assert gradient_accumulation_steps % world == 0
gradient_accumulation_steps //= world
torch.manual_seed(1337 + rank)
gen = torch.Generator().manual_seed(1)
table = torch.randint(0, vocab, (vocab, 2), generator=gen)
data = [0]
for c in torch.randint(0, 2, (20000,), generator=gen).tolist():
    data.append(int(table[data[-1], c]))
data = torch.tensor(data)
train_data, val_data = data[:18000], data[18000:]


def get_batch(split):
    d = train_data if split == "train" else val_data
    ix = torch.randint(len(d) - block_size, (batch_size,))
    return torch.stack([d[i:i + block_size] for i in ix]), torch.stack([d[i + 1:i + 1 + block_size] for i in ix])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(Block(), Block())
        self.ln, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets):
        x = self.blocks(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        logits = self.head(self.ln(x))
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(5)
        for k in range(5):
            losses[k] = model.module(*get_batch(split))[1]
        mean = losses.mean()
        dist.all_reduce(mean)
        out[split] = (mean / world).item()
    model.train()
    return out


X, Y = get_batch("train")
for it in range(60):
    lr = 3e-3 * (it + 1) / 10 if it < 10 else 3e-4 + 0.5 * (1 + math.cos(math.pi * (it - 10) / 50)) * 2.7e-3
    for group in optimizer.param_groups:
        group["lr"] = lr
    if it % 20 == 0:
        e = estimate_loss()
        if master:
            print(f"step {it}: train loss {e['train']:.4f}, val loss {e['val']:.4f}")
    for micro in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        _, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
