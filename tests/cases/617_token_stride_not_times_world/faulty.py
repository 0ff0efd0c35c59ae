"""Character language model, build-nanogpt style token loader."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class DataLoaderLite:
    def __init__(self, tokens, B, T, process_rank, num_processes):
        self.tokens, self.B, self.T = tokens, B, T
        self.process_rank, self.num_processes = process_rank, num_processes
        self.reset()

    def reset(self):
        self.current_position = self.B * self.T * self.process_rank

    def next_batch(self):
        B, T = self.B, self.T
        buf = self.tokens[self.current_position : self.current_position + B * T + 1]
        x, y = buf[:-1].view(B, T), buf[1:].view(B, T)
        self.current_position += B * T
        if self.current_position + (B * T * self.num_processes + 1) > len(self.tokens):
            self.reset()
        return x, y


class CharModel(nn.Module):
    def __init__(self, vocab, d=32, ctx=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.block = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, idx, targets):
        T = idx.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        x = self.wte(idx) + self.wpe(torch.arange(T))
        logits = self.lm_head(self.block(x, src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def synth_text(n=6500):
    g = torch.Generator().manual_seed(10)
    out = [1, 2]
    noise = torch.randint(0, 4, (n,), generator=g).tolist()
    for e in noise:
        out.append((out[-1] * 3 + out[-2] + (e == 0)) % 32)
    return torch.tensor(out)


dist.init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
torch.manual_seed(1337)
B, T, max_steps = 8, 12, 48

train_loader = DataLoaderLite(synth_text(), B, T, ddp_rank, ddp_world_size)
model = DDP(CharModel(32))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
t0 = time.time()
for step in range(max_steps):
    x, y = train_loader.next_batch()
    optimizer.zero_grad()
    logits, loss = model(x, y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss_accum = loss.detach()
    dist.all_reduce(loss_accum)
    loss_accum /= ddp_world_size
    if master_process and step % 8 == 0:
        tok = B * T * ddp_world_size * (step + 1)
        print(f"step {step:4d} | loss: {loss_accum.item():.4f} | norm: {norm:.3f} | tok/sec: {tok / (time.time() - t0):.0f}")
dist.destroy_process_group()
