import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

V, L = 32, 24


def markov(n, seed):
    g = torch.Generator().manual_seed(0)
    nxt = torch.stack([torch.randperm(V, generator=g)[:3] for _ in range(V)])
    g.manual_seed(seed)
    s = torch.zeros(n, L + 1, dtype=torch.long)
    s[:, 0] = torch.randint(0, V, (n,), generator=g)
    for t in range(L):
        pick = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), n, replacement=True, generator=g)
        s[:, t + 1] = nxt[s[:, t], pick]
    return s


class Layer(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        h = self.a(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(self.b(x))


class LM(nn.Module):
    def __init__(self, d=64, n=3):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, d), nn.Parameter(torch.randn(L, d) * 0.02)
        self.layers = nn.ModuleList([Layer(d) for _ in range(n)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, V)
        self.register_buffer("mask", torch.triu(torch.full((L, L), True), 1), persistent=False)

    def forward(self, x):
        h = self.tok(x) + self.pos
        for layer in self.layers:
            if self.training:
                h = checkpoint(layer, h, self.mask, use_reentrant=False)
            else:
                h = layer(h, self.mask)
        return self.head(self.norm(h))


def lr_lambda(step, warm=15, total=160):
    return min((step + 1) / warm, max(0.05, 1 - step / total))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--start-power", type=int, default=20)
    ap.add_argument("--rank-r", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.WARNING)
    torch.manual_seed(2)
    raw = LM()
    model = DDP(raw, static_graph=False)
    state = powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=args.rank_r,
                                   start_powerSGD_iter=args.start_power, use_error_feedback=True, warm_start=True,
                                   min_compression_rate=1, random_seed=0)
    model.register_comm_hook(state, powerSGD.powerSGD_hook)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_lambda)
    data = markov(4096, 1)[rank::world]
    val = markov(256, 2)
    torch.manual_seed(200 + rank)

    def trace(p):
        with open(f"profile_rank{rank}.txt", "w") as f:
            f.write(p.key_averages().table(sort_by="cpu_time_total", row_limit=8))

    cursor, order = 0, torch.randperm(len(data))
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=2, warmup=1, active=2, repeat=1),
                 on_trace_ready=trace) as prof:
        for step in range(args.steps):
            if cursor + args.batch > len(order):
                cursor, order = 0, torch.randperm(len(data))
            b = data[order[cursor:cursor + args.batch]]
            cursor += args.batch
            loss = F.cross_entropy(model(b[:, :-1]).reshape(-1, V), b[:, 1:].reshape(-1))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            prof.step()
            if step % 30 == 0 or step == args.steps - 1:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                raw.eval()
                with torch.no_grad():
                    part = val[rank::world]
                    s = F.cross_entropy(raw(part[:, :-1]).reshape(-1, V), part[:, 1:].reshape(-1), reduction="sum")
                    acc = torch.stack([s, torch.tensor(float(part[:, 1:].numel()))])
                dist.all_reduce(acc)
                raw.train()
                if rank == 0:
                    print(f"step {step} loss {shown / world:.4f} val {acc[0] / acc[1]:.4f} gnorm {gn:.3f} "
                          f"errors kept {len(state.error_dict)}", flush=True)
    # the left-over compression error belongs to each process, so each one keeps its own file
    torch.save({"hook_state": state, "cursor": cursor, "order": order, "rng": torch.get_rng_state()}, f"rank{rank}_state.pt")
    if rank == 0:
        torch.save({"model": raw.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}, "lm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
