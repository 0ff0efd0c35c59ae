"""Both processes form one tensor-parallel pair: the same batches on both, parameters split by column and row."""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.head_dim = dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v)
        return self.o(a.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn, self.mlp = Attention(dim, heads), Mlp(dim)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class SetModel(nn.Module):
    """Count how many tokens of a set are above its own median-like pivot."""

    def __init__(self, dim=32, heads=4, depth=2, classes=5):
        super().__init__()
        self.inp = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.cls = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.cls(x.mean(1))


PLAN = {
    "attn.q": ColwiseParallel(),
    "attn.k": ColwiseParallel(),
    "attn.v": ColwiseParallel(),
    "attn.o": RowwiseParallel(),
    "mlp.w1": ColwiseParallel(),
    "mlp.w2": RowwiseParallel(),
}


def batch(n, gen, classes=5):
    pts = torch.randn(n, 12, 3, generator=gen)
    count = (pts[..., 0] + 0.5 * pts[..., 1] > 0).sum(1)
    return pts, ((count - 3).clamp(0, classes - 1))


def run():
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(6)
    model = SetModel()
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    opt = torch.optim.AdamW(
        [{"params": split, "weight_decay": 0.02}, {"params": whole, "weight_decay": 0.0}], lr=2e-3, foreach=False
    )
    steps = 100
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10) * 0.5 * (1 + math.cos(math.pi * s / steps)))
    gen = torch.Generator().manual_seed(123)
    held = batch(400, torch.Generator().manual_seed(321))

    for step in range(steps):
        x, y = batch(48, gen)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 25 == 24:
            model.eval()
            with torch.no_grad():
                acc = (model(held[0]).argmax(1) == held[1]).float().mean().item()
            model.train()
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {loss.item():.4f} held-out acc {acc:.3f}", flush=True)

    full = {k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(full, "set_model.pt")
        single = SetModel()
        single.load_state_dict(full)
        with torch.no_grad():
            print(f"one process: acc {(single(held[0]).argmax(1) == held[1]).float().mean().item():.3f}", flush=True)


def main():
    dist.init_process_group("gloo")
    run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
