"""Finetune a small rotary transformer that is built on the meta device, sharded, then filled from a checkpoint."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, HEADS, LAYERS, LENGTH, LAG = 24, 64, 4, 2, 32, 3


def rope_frequencies(dim):
    return 1.0 / (100.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", rope_frequencies(dim), persistent=False)

    def forward(self, x):
        angle = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.rotary = Rotary(DIM // HEADS)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        att = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def sequences(n, gen):
    """Random tokens; the target is the token LAG places back."""
    ids = torch.randint(VOCAB, (n, LENGTH), generator=gen)
    return ids, ids.roll(LAG, dims=1)


def loss_of(model, ids, target):
    return F.cross_entropy(model(ids)[:, LAG:].flatten(0, 1), target[:, LAG:].flatten())


def write_base_checkpoint(path, steps):
    torch.manual_seed(0)
    model, gen = Decoder(), torch.Generator().manual_seed(1)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = loss_of(model, *sequences(16, gen))
        opt.zero_grad()
        loss.backward()
        opt.step()
    torch.save(model.state_dict(), path)
    print(f"base checkpoint at loss {loss.item():.3f}", flush=True)


def build(path, mesh):
    with torch.device("meta"):
        model = Decoder()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    full = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        write_base_checkpoint("base.pt", steps=60)
    dist.barrier()

    model = build("base.pt", init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(10 + rank)
    for step in range(1, args.steps + 1):
        loss = loss_of(model, *sequences(args.batch, gen))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step == 1 or step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d} loss {mean.item() / dist.get_world_size():.4f}", flush=True)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(weights, "finetuned.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
