"""Sequence reversal with an encoder-only transformer, parameters sharded with FSDP2 (fully_shard)."""
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

log = logging.getLogger("fsdp2")


@dataclass(frozen=True)
class Config:
    vocab: int = 24
    length: int = 12
    width: int = 64
    heads: int = 4
    depth: int = 3
    batch: int = 32
    steps: int = 60
    lr: float = 3e-3
    warmup: int = 6
    clip: float = 1.0
    seed: int = 5


class EncoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.norm1 = nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.norm2 = nn.LayerNorm(cfg.width)
        self.ff = nn.Sequential(nn.Linear(cfg.width, 4 * cfg.width), nn.GELU(), nn.Linear(4 * cfg.width, cfg.width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.ff(self.norm2(x))


class Reverser(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab, cfg.width)
        self.positions = nn.Parameter(0.5 * torch.randn(cfg.length, cfg.width))
        self.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocab)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float()  # the loss is computed in float32


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batches(cfg, generator):
    while True:
        ids = torch.randint(cfg.vocab, (cfg.batch, cfg.length), generator=generator)
        yield ids, ids.flip(1)


@torch.no_grad()
def evaluate(model, cfg, rank):
    model.eval()
    stream = batches(cfg, torch.Generator().manual_seed(10_000 + rank))
    counts = torch.zeros(2)
    for _ in range(4):
        ids, target = next(stream)
        counts[0] += (model(ids).argmax(-1) == target).sum()
        counts[1] += target.numel()
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def save(model, optimizer, step, path, rank):
    # Gathering full tensors is collective: all ranks take part, one writes.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save({"model": model_state, "optim": optim_state, "step": step}, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    torch.manual_seed(cfg.seed)  # fully_shard keeps each rank's slice of its own weights: they must start equal
    model = shard(Reverser(cfg), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / cfg.warmup))
    local = sum(p.to_local().numel() for p in model.parameters())
    log.info("%d of %d parameters on this rank", local, sum(p.numel() for p in model.parameters()))

    stream = batches(cfg, torch.Generator().manual_seed(1 + rank))
    window = torch.zeros(())
    for step in range(1, cfg.steps + 1):
        ids, target = next(stream)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        window += loss.detach()
        if step % 15 == 0:
            norm = norm.full_tensor()  # collective, before the rank-0-only log call
            dist.all_reduce(window)
            log.info("step %3d loss %.4f grad norm %.3f", step, window.item() / (15 * world), norm.item())
            window.zero_()

    accuracy = evaluate(model, cfg, rank)
    log.info("token accuracy %.3f", accuracy)
    save(model, optimizer, cfg.steps, "reverser.pt", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
