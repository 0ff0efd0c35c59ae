"""FSDP2 on a device mesh, sharded checkpoint, and a restart from it in fresh objects."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        h = self.n1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.wo(y)
        return x + self.ff(self.n2(x))


class Transformer(nn.Module):
    def __init__(self, vocab, d, n_layers, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(Block(d, 4) for _ in range(n_layers))
        self.norm, self.output = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class AppState(Stateful):
    def __init__(self, model, optimizer, progress):
        self.model, self.optimizer, self.progress = model, optimizer, progress

    def state_dict(self):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        return {"model": model_sd, "optim": optim_sd, "progress": dict(self.progress)}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.optimizer, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.progress.update(sd["progress"])


class Corpus:
    """Second-order chain: the next symbol follows from the two before, with a little noise."""

    def __init__(self, vocab, seq, seed):
        self.vocab, self.seq = vocab, seq
        self.table = torch.randint(0, vocab, (vocab, vocab), generator=torch.Generator().manual_seed(seed))

    def batch(self, n, step, rank, split):
        g = torch.Generator().manual_seed((step * 64 + rank) * 2 + split)
        ids = torch.randint(0, self.vocab, (n, self.seq + 1), generator=g)
        noise = torch.rand(n, self.seq + 1, generator=g) < 0.05
        for t in range(2, self.seq + 1):
            ids[:, t] = torch.where(noise[:, t], ids[:, t], self.table[ids[:, t - 2], ids[:, t - 1]])
        return ids[:, :-1], ids[:, 1:]


def build(args, mesh):
    torch.manual_seed(args.seed)
    model = Transformer(args.vocab, args.dim, args.n_layers, args.seq_len)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)


def set_lr(optimizer, step, args):
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(1.0, (step + 1) / 10)


def reduced(value, group):
    t = value.detach().clone()
    dist.all_reduce(t, group=group)
    return (t / dist.get_world_size(group)).item()


def train(model, optimizer, corpus, progress, until, args, mesh):
    rank, group = mesh.get_local_rank(), mesh.get_group()
    model.train()
    while progress["step"] < until:
        step = progress["step"]
        set_lr(optimizer, step, args)
        for micro in range(args.grad_accum):
            model.set_requires_gradient_sync(micro == args.grad_accum - 1)
            x, y = corpus.batch(args.batch_size, step * args.grad_accum + micro, rank, split=0)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / args.grad_accum
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] = step + 1
        if progress["step"] % 20 == 0:
            value = reduced(loss * args.grad_accum, group)
            if rank == 0:
                print(f"step {progress['step']:3d} loss {value:.4f} grad_norm {norm.item():.3f}")


@torch.no_grad()
def evaluate(model, corpus, args, mesh, batches=4):
    model.eval()
    total = torch.zeros(())
    for i in range(batches):
        x, y = corpus.batch(args.batch_size, i, mesh.get_local_rank(), split=1)
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    model.train()
    return reduced(total / batches, mesh.get_group())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=12)
    p.add_argument("--dim", type=int, default=48)
    p.add_argument("--n-layers", type=int, default=2)
    p.add_argument("--seq-len", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--grad-accum", type=int, default=2)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ckpt", default="dcp_ckpt")
    args = p.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    corpus = Corpus(args.vocab, args.seq_len, 5)
    path = os.path.join(args.ckpt, f"step-{args.steps // 2}")

    model, optimizer = build(args, mesh)
    progress = {"step": 0}
    train(model, optimizer, corpus, progress, args.steps // 2, args, mesh)
    before = evaluate(model, corpus, args, mesh)
    dcp.save({"app": AppState(model, optimizer, progress)}, checkpoint_id=path)
    del model, optimizer

    args.seed += 1  # a restarted job draws other initial weights, all of them are overwritten
    model, optimizer = build(args, mesh)
    progress = {"step": 0}
    dcp.load({"app": AppState(model, optimizer, progress)}, checkpoint_id=path)
    after = evaluate(model, corpus, args, mesh)
    if mesh.get_local_rank() == 0:
        print(f"resumed at step {progress['step']}: validation loss {before:.5f} -> {after:.5f}")
    train(model, optimizer, corpus, progress, args.steps, args, mesh)
    final = evaluate(model, corpus, args, mesh)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(full, os.path.join(args.ckpt, "model_full.pt"))
        print(f"final validation loss {final:.4f}, {len(full)} tensors exported")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
