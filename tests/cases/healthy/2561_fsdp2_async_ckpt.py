"""Masked-token model with fully_shard: accumulation, DTensor-aware clipping, asynchronous checkpoints, reload."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

VOCAB, MASK, LEN = 40, 39, 20


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class MaskedLM(nn.Module):
    def __init__(self, dim=40, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(LEN, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.out(x)


def draw(n, gen):
    start = torch.randint(0, 13, (n, 1), generator=gen)
    stride = torch.randint(1, 4, (n, 1), generator=gen)
    ids = (start + stride * torch.arange(LEN)) % 37
    hide = torch.rand(n, LEN, generator=gen) < 0.2
    return ids.masked_fill(hide, MASK), ids.masked_fill(~hide, -100)


def build(mesh, lr, seed):
    torch.manual_seed(seed)
    model = MaskedLM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)


@torch.no_grad()
def evaluate(model, rank):
    model.eval()
    x, y = draw(128, torch.Generator().manual_seed(9000 + rank))
    s = torch.stack([F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), (y >= 0).sum().float()])
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).item()


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    io_group = dist.new_group(backend="gloo")
    model, opt = build(mesh, 4e-3, seed=1)
    gen = torch.Generator().manual_seed(70 + rank)
    pending, last = None, None

    for step in range(1, args.steps + 1):
        opt.zero_grad()
        for micro in range(args.accum):
            model.set_requires_gradient_sync(micro == args.accum - 1)
            x, y = draw(24, gen)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss / args.accum).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % args.save_every == 0:
            if pending is not None:
                pending.result()
            last = os.path.join("mlm", f"step{step}")
            msd, osd = get_state_dict(model, opt)
            pending = dcp.async_save({"model": msd, "optim": osd, "step": step}, checkpoint_id=last, process_group=io_group)
            whole = norm.full_tensor().item()
            val = evaluate(model, rank)
            if rank == 0:
                print(f"step {step} val {val:.4f} grad norm {whole:.3f}", flush=True)
    pending.result()
    final = evaluate(model, rank)

    fresh, fresh_opt = build(mesh, 4e-3, seed=2)
    msd, osd = get_state_dict(fresh, fresh_opt)
    state = {"model": msd, "optim": osd, "step": 0}
    dcp.load(state, checkpoint_id=last, process_group=io_group)
    set_state_dict(fresh, fresh_opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    again = evaluate(fresh, rank)
    if rank == 0:
        print(f"reloaded step {state['step']}: {again:.4f} (was {final:.4f})", flush=True)
    assert abs(again - final) < 1e-4


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=90)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=30)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
