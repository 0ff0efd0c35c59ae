"""Tiny transformer, parameters sharded with fully_shard; full weights are exported every few steps."""
import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self, vocab, dim=48, heads=4, depth=3, length=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequences(batch, length, vocab, gen):
    """Arithmetic progressions modulo the vocabulary."""
    start = torch.randint(0, vocab, (batch, 1), generator=gen)
    stride = torch.randint(1, 4, (batch, 1), generator=gen)
    return (start + stride * torch.arange(length + 1)) % vocab


def export(model, path, step, loss, rank):
    weights = {name: p.full_tensor().cpu() for name, p in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, path)
        with open("export.jsonl", "a") as f:
            f.write(json.dumps({"step": step, "loss": loss, "tensors": len(weights)}) + "\n")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--export-every", type=int, default=15)
    ap.add_argument("--vocab", type=int, default=29)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(2)
    model = LM(args.vocab)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(100 + rank)

    for step in range(1, args.steps + 1):
        ids = sequences(16, 24, args.vocab, gen)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % args.export_every == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean = mean.item() / world
            if rank == 0:
                print(f"step {step}: loss {mean:.4f}", flush=True)
            export(model, f"weights_{step:04d}.pt", step, mean, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
