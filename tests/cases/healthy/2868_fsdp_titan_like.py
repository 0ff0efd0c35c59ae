"""Sharded language model with token-normalised loss, a resumable data stream and distributed checkpoints."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

IGNORE = -100


@dataclass
class JobConfig:
    steps: int = 50
    first_leg: int = 30
    batch: int = 8
    seq: int = 24
    vocab: int = 40
    dim: int = 48
    lr: float = 3e-3
    warmup: int = 8
    max_norm: float = 1.0
    accumulation: int = 2
    folder: str = "titan_ckpt"


class Stream:
    """Documents are dealt out by index, rank by rank; the position is part of the state."""

    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world, self.position = cfg, rank, world, 0

    def document(self, index):
        g = torch.Generator().manual_seed(10_000 + index)
        length = int(torch.randint(10, self.cfg.seq + 1, (1,), generator=g))
        start, step = torch.randint(0, self.cfg.vocab, (2,), generator=g)
        tokens = (start + (step % 5 + 1) * torch.arange(self.cfg.seq + 1)) % self.cfg.vocab
        label = tokens[1:].clone()
        label[length:] = IGNORE
        return tokens[:-1], label

    def next_batch(self):
        first = self.position * self.world + self.rank
        rows = [self.document(first + k * self.world) for k in range(self.cfg.batch)]
        self.position += self.cfg.batch
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.seq, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg.dim) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(cfg.dim), nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Job:
    def __init__(self, cfg, mesh):
        self.cfg, self.rank, self.world = cfg, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(88)
        self.model = Decoder(cfg)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.shape)
        self.stream = Stream(cfg, self.rank, self.world)
        self.step = 0

    def shape(self, k):
        if k < self.cfg.warmup:
            return (k + 1) / self.cfg.warmup
        return max(0.05, 1 - (k - self.cfg.warmup) / (self.cfg.steps - self.cfg.warmup))

    def train_step(self):
        batches = [self.stream.next_batch() for _ in range(self.cfg.accumulation)]
        tokens = torch.tensor(float(sum((label != IGNORE).sum() for _, label in batches)))
        dist.all_reduce(tokens)
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for i, (x, label) in enumerate(batches):
            self.model.set_requires_gradient_sync(i == len(batches) - 1)
            logits = self.model(x)
            summed = nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=IGNORE, reduction="sum")
            (summed * self.world / tokens).backward()
            total += summed.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        if self.step % 10 == 0:
            dist.all_reduce(total)
            norm = norm.full_tensor()
            if self.rank == 0:
                print(f"step {self.step} loss {(total / tokens).item():.4f} grad norm {norm.item():.3f}", flush=True)

    def save(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=os.path.join(self.cfg.folder, f"step-{self.step}"))
        if self.rank == 0:
            extra = {"step": self.step, "position": self.stream.position, "schedule": self.schedule.state_dict()}
            torch.save(extra, os.path.join(self.cfg.folder, f"extra-{self.step}.pt"))
        dist.barrier()

    def load(self, step):
        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=os.path.join(self.cfg.folder, f"step-{step}"))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim)
        extra = torch.load(os.path.join(self.cfg.folder, f"extra-{step}.pt"), weights_only=False)
        self.step, self.stream.position = extra["step"], extra["position"]
        self.schedule.load_state_dict(extra["schedule"])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cfg = JobConfig()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    job = Job(cfg, mesh)
    while job.step < cfg.first_leg:
        job.train_step()
    job.save()
    job = Job(cfg, mesh)
    job.load(cfg.first_leg)
    while job.step < cfg.steps:
        job.train_step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
