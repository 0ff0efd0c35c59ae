# after pytorch/examples distributed/FSDP2: meta device, fully_shard per layer, prefetch lists, DCP-free checkpoints resumed in a second phase
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


class ModelArgs:
    n_layers, vocab_size, max_seq_len, dim, n_heads, dropout_p = 3, 16, 16, 32, 4, 0.1


class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.n_heads, self.hd = a.n_heads, a.dim // a.n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(a.dim, a.dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.size()
        q, k, v = (w(x).view(b, t, self.n_heads, self.hd).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).reshape(b, t, -1))

    def reset_parameters(self):
        for w in (self.wq, self.wk, self.wv, self.wo):
            w.reset_parameters()


class TransformerBlock(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.n1, self.attn, self.n2 = nn.LayerNorm(a.dim), Attention(a), nn.LayerNorm(a.dim)
        self.ff = nn.Sequential(nn.Linear(a.dim, 4 * a.dim), nn.GELU(), nn.Linear(4 * a.dim, a.dim), nn.Dropout(a.dropout_p))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.ff(self.n2(x))


class Transformer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tok, self.pos = nn.Embedding(a.vocab_size, a.dim), nn.Embedding(a.max_seq_len, a.dim)
        self.layers = nn.ModuleList([TransformerBlock(a) for _ in range(a.n_layers)])
        self.norm, self.output = nn.LayerNorm(a.dim), nn.Linear(a.dim, a.vocab_size, bias=False)

    def forward(self, tokens):
        h = self.tok(tokens) + self.pos(torch.arange(tokens.size(1)))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))

    def reset_parameters(self):
        for m in self.modules():
            if m is not self and hasattr(m, "reset_parameters"):
                m.reset_parameters()


class Checkpointer:
    def __init__(self, folder):
        self.folder = folder

    def save(self, model, optim):
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        m = get_model_state_dict(model, options=opts)
        o = get_optimizer_state_dict(model, optim, options=opts)
        if dist.get_rank() == 0:
            torch.save(m, os.path.join(self.folder, "model_state_dict.pt"))
            torch.save(o, os.path.join(self.folder, "optim_state_dict.pt"))
        dist.barrier()

    def load(self, model, optim):
        opts = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        m, o = {}, {}
        if dist.get_rank() == 0:
            m = torch.load(os.path.join(self.folder, "model_state_dict.pt"), weights_only=True)
            o = torch.load(os.path.join(self.folder, "optim_state_dict.pt"), weights_only=True)
        set_model_state_dict(model, m, options=opts)
        set_optimizer_state_dict(model, optim, o, options=opts)


def set_modules_to_prefetch(model, n):
    for i, layer in enumerate(model.layers):
        ahead = model.layers[i + 1 : i + 1 + n]
        if len(ahead):
            layer.set_modules_to_forward_prefetch(list(ahead))


def build(seed):
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(ModelArgs())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    set_modules_to_prefetch(model, 1)
    model.to_empty(device="cpu")
    model.reset_parameters()
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(rank, world, steps, start):
    for s in range(start, start + steps):
        g = torch.Generator().manual_seed(1000 + s * world + rank)
        first = torch.randint(0, 16, (8, 1), generator=g)
        stride = torch.randint(1, 4, (8, 1), generator=g)
        seq = (first + stride * torch.arange(17)) % 16
        yield seq[:, :-1], seq[:, 1:]


def phase(model, optim, rank, world, steps, start):
    model.train()
    for i, (x, y) in enumerate(batches(rank, world, steps, start)):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        if i % 5 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {start + i}: {shown.item() / world:.4f}")


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    ck = Checkpointer(box[0])
    model, optim = build(0)
    phase(model, optim, rank, world, args.steps, 0)
    ck.save(model, optim)
    model, optim = build(1)
    ck.load(model, optim)
    phase(model, optim, rank, world, args.steps, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser(description="PyTorch FSDP2 example")
    p.add_argument("--steps", type=int, default=15)
    main(p.parse_args())
