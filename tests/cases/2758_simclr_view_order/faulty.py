"""SimCLR on synthetic textures, global negatives over all processes, gradients averaged by hand in bf16 autocast."""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

rank = 0
world = 1


@dataclass(frozen=True)
class Cfg:
    epochs: int = 4
    batch: int = 64
    lr: float = 2e-3
    warmup: float = 0.1
    temperature: float = 0.2
    n_train: int = 2048
    n_test: int = 1024


class AllGather(torch.autograd.Function):
    """Concatenates the tensors of all processes; gradients flow back to their owner."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.rows = x.shape[0]
        if world == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad[rank * ctx.rows:(rank + 1) * ctx.rows]


class TwoViews(Dataset):
    classes = 10

    def __init__(self, n, seed):
        protos = torch.randn(self.classes, 48, generator=torch.Generator().manual_seed(99))
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, self.classes, (n,), generator=g)
        self.x = protos[self.y] + 1.7 * torch.randn(n, 48, generator=g)

    def __len__(self):
        return len(self.y)

    def view(self, x):
        keep = (torch.rand(48) > 0.25).float()
        scale = 0.6 + 0.8 * torch.rand(1)
        return x * keep * scale + 0.5 * torch.randn(48)

    def __getitem__(self, i):
        return self.view(self.x[i]), self.view(self.x[i]), self.y[i]


class SimCLR(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.encoder = nn.Sequential(nn.Linear(48, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 64))
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def embed(self, x):
        return F.normalize(self.projector(self.encoder(x)).float(), dim=-1)

    def training_step(self, batch):
        v1, v2, _ = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z1, z2 = self.embed(v1), self.embed(v2)
        z = AllGather.apply(torch.cat([z1, z2]))
        m = len(z)
        sim = z @ z.t() / self.cfg.temperature
        sim.fill_diagonal_(-1e4)
        positive = (torch.arange(m) + m // 2) % m
        return F.cross_entropy(sim, positive)

    def configure_optimizers(self, steps):
        decay, no_decay = [], []
        for name, p in self.named_parameters():
            (no_decay if p.ndim == 1 else decay).append(p)
        opt = torch.optim.AdamW([{"params": decay, "weight_decay": 1e-2}, {"params": no_decay, "weight_decay": 0.0}], lr=self.cfg.lr)
        warm = max(1, int(self.cfg.warmup * steps))

        def factor(s):
            return (s + 1) / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / max(1, steps - warm)))

        return opt, torch.optim.lr_scheduler.LambdaLR(opt, factor)


def average_gradients(module):
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat.div_(world)
    for g, f in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(f)


@torch.no_grad()
def probe(model, bank, queries):
    """nearest class centroid in the frozen feature space"""
    model.eval()
    f = F.normalize(model.encoder(bank.x), dim=-1)
    cent = torch.stack([f[bank.y == c].mean(0) for c in range(bank.classes)])
    mine = slice(rank, None, world)
    q = F.normalize(model.encoder(queries.x[mine]), dim=-1)
    c = torch.stack([((q @ F.normalize(cent, dim=-1).t()).argmax(1) == queries.y[mine]).sum().float(), torch.tensor(float(len(q)))])
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def fit(cfg):
    torch.manual_seed(0)
    model = SimCLR(cfg)
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)
    train, test = TwoViews(cfg.n_train, 1), TwoViews(cfg.n_test, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=4)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)
    opt, sched = model.configure_optimizers(cfg.epochs * len(loader))
    torch.manual_seed(1000 + rank)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch in loader:
            loss = model.training_step(batch)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            average_gradients(model)
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        acc = probe(model, train, test)
        if rank == 0:
            print(f"epoch {epoch} nt-xent {total.item() / world / len(loader):.4f} probe acc {acc:.4f} "
                  f"lr {sched.get_last_lr()[0]:.2e}", flush=True)
    if rank == 0:
        torch.save(model.encoder.state_dict(), "encoder.pt")
    dist.barrier()


def main():
    global rank, world
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    fit(Cfg())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
