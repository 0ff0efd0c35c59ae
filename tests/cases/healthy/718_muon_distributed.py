"""Muon in the manner of modded-nanogpt: every rank orthogonalises its share of the matrices, updates are exchanged by all_gather; Adam for the rest."""
import os
import sys
import time
import uuid

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

with open(sys.argv[0]) as f:
    code = f.read()  # read the code of this file ASAP, for logging


def zeropower_via_newtonschulz5(G, steps=5):
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    return X.mT if G.size(-2) > G.size(-1) else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5, rank=0, world_size=1):
        self.rank, self.world_size = rank, world_size
        params = list(params)
        groups = []
        for size in sorted({p.numel() for p in params}):
            buf = torch.empty(world_size, size)
            groups.append(dict(params=[p for p in params if p.numel() == size], update_buffer=buf, update_buffer_views=[buf[i] for i in range(world_size)]))
        super().__init__(groups, dict(lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            views, params = group["update_buffer_views"], group["params"]
            handle, params_world = None, None

            def update_prev():
                handle.wait()
                for p_world, g_world in zip(params_world, views):
                    p_world.add_(g_world.view_as(p_world), alpha=-group["lr"] * max(1, p_world.size(-2) / p_world.size(-1)) ** 0.5)

            for base_i in range(len(params))[:: self.world_size]:
                if base_i + self.rank < len(params):
                    p = params[base_i + self.rank]
                    g = p.grad
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(g)
                    buf = state["momentum_buffer"]
                    buf.lerp_(g, 1 - group["momentum"])
                    g = g.lerp_(buf, group["momentum"]) if group["nesterov"] else buf
                    g = zeropower_via_newtonschulz5(g, steps=group["ns_steps"]).flatten().contiguous()
                else:
                    g = views[self.rank].clone()
                if base_i > 0:
                    update_prev()
                handle = dist.all_gather(views, g, async_op=True)
                params_world = params[base_i : base_i + self.world_size]
            update_prev()


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc, self.out = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        nn.init.zeros_(self.proj.weight), nn.init.zeros_(self.out.weight)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(F.rms_norm(x, (d,))).chunk(3, -1))
        y = F.scaled_dot_product_attention(F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),)), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.out(F.relu(self.fc(F.rms_norm(x, (d,)))).square())


class GPT(nn.Module):
    def __init__(self, vocab=32, d=32, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d, 4) for _ in range(layers)])
        self.scalars = nn.Parameter(torch.ones(layers))
        self.lm_head = nn.Linear(d, vocab, bias=False)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, idx, target):
        x = x0 = F.rms_norm(self.embed(idx), (32,))
        for lam, block in zip(self.scalars, self.blocks):
            x = block(lam * x + (1 - lam) * x0)
        logits = 15 * torch.tanh(self.lm_head(F.rms_norm(x, (32,))) / 15)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def data_generator(tokens, batch, seq, rank, world):
    pos = 0
    while True:
        if pos + batch * seq * world + 1 >= len(tokens):
            pos = 0
        buf = tokens[pos + rank * batch * seq :][: batch * seq + 1]
        yield buf[:-1].view(batch, seq), buf[1:].view(batch, seq)
        pos += batch * seq * world


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="gloo")
dist.barrier()
master_process = rank == 0
if master_process:
    logfile = f"/tmp/{uuid.uuid4()}.txt"


def print0(s, console=False):
    if master_process:
        with open(logfile, "a") as f:
            if console:
                print(s)
            print(s, file=f)


print0(code)
g = torch.Generator().manual_seed(0)
tokens = torch.randint(1, 5, (20001,), generator=g).cumsum(0) % 32
train_loader = data_generator(tokens[:16001], 4, 32, rank, world_size)
model = GPT()
for param in model.parameters():
    dist.broadcast(param.detach(), 0)
hidden = [p for n, p in model.blocks.named_parameters() if p.ndim >= 2]
optimizer1 = torch.optim.Adam([dict(params=[model.lm_head.weight], lr=0.01), dict(params=[model.embed.weight], lr=0.05), dict(params=[model.scalars], lr=0.02)], betas=(0.8, 0.95))
optimizer2 = Muon(hidden, lr=0.02, momentum=0.95, rank=rank, world_size=world_size)
optimizers = [optimizer1, optimizer2]
for opt in optimizers:
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]
train_steps = 40


def get_lr(step):
    x = step / train_steps
    return 1.0 if x < 0.6 else (1 - x) / 0.4 * 1.0 + (x - 0.6) / 0.4 * 0.1


t0 = time.perf_counter()
for step in range(train_steps + 1):
    last_step = step == train_steps
    if last_step or step % 20 == 0:
        model.eval()
        val_loader = data_generator(tokens[16000:], 4, 32, rank, world_size)
        val_loss = torch.zeros(())
        with torch.no_grad():
            for _ in range(8):
                val_loss += model(*next(val_loader))
        val_loss /= 8
        dist.all_reduce(val_loss)
        val_loss /= world_size
        print0(f"step:{step}/{train_steps} val_loss:{val_loss:.4f} train_time:{1000 * (time.perf_counter() - t0):.0f}ms", console=True)
        model.train()
    if last_step:
        if master_process:
            torch.save(dict(step=step, code=code, model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers]), logfile.replace(".txt", ".pt"))
        break
    model(*next(train_loader)).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * get_lr(step)
    for group in optimizer2.param_groups:
        frac = min(step / 20, 1)
        group["momentum"] = (1 - frac) * 0.85 + frac * 0.95
    for opt in optimizers:
        opt.step()
    model.zero_grad(set_to_none=True)
dist.destroy_process_group()
