"""Memory-lean fine-tuning: every parameter owns its optimizer, stepped while backward runs."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CFG = dict(epochs=5, batch=32, lr=2e-3, max_norm=0.5, seed=5, n=2048, dim=20)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def heavy_tailed(n, dim, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(dim, 3, generator=torch.Generator().manual_seed(11))
    x = torch.randn(n, dim, generator=g)
    y = torch.tanh(x @ w) * 2
    rows = torch.rand(n, generator=g) < 0.02
    y[rows] += 40 * torch.randn(int(rows.sum()), 3, generator=g)
    return TensorDataset(x, y)


class Regressor(nn.Module):
    def __init__(self, dim, width=64):
        super().__init__()
        self.stem = nn.Linear(dim, width)
        self.mid = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        for layer in self.mid:
            h = h + torch.relu(layer(h))
        return self.head(self.norm(h))


class FusedOptimizers:
    """One AdamW per parameter; gradients are freed as soon as they are used."""

    def __init__(self, model, lr, world, max_norm):
        self.world = world
        self.max_norm = max_norm
        self.norms = []
        self.opts = {p: torch.optim.AdamW([p], lr=lr) for p in model.parameters() if p.requires_grad}
        self.scheds = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=CFG["epochs"]) for o in self.opts.values()]
        for p in self.opts:
            p.register_post_accumulate_grad_hook(self._on_grad)

    def _on_grad(self, p):
        dist.all_reduce(p.grad)
        p.grad.div_(self.world)
        self.norms.append(nn.utils.clip_grad_norm_([p], self.max_norm).item())
        self.opts[p].step()
        p.grad = None

    def epoch_end(self):
        for s in self.scheds:
            s.step()
        out, self.norms = self.norms, []
        return max(out, default=0.0)


def evaluate(model, loader):
    model.eval()
    s = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            s += torch.tensor([(model(x) - y).abs().mean(1).sum().item(), float(len(x))])
    dist.all_reduce(s)
    model.train()
    return (s[0] / s[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_all(CFG["seed"])
    model = Regressor(CFG["dim"])
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)

    train = heavy_tailed(CFG["n"], CFG["dim"], 1)
    sampler = DistributedSampler(train, seed=CFG["seed"])
    loader = DataLoader(train, batch_size=CFG["batch"], sampler=sampler)
    test = heavy_tailed(256, CFG["dim"], 2)
    test_loader = DataLoader(test, batch_size=64, sampler=DistributedSampler(test, shuffle=False))
    fused = FusedOptimizers(model, CFG["lr"], world, CFG["max_norm"])

    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        running, count = 0.0, 0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            running += loss.item()
            count += 1
        stat = torch.tensor([running, float(count)])
        dist.all_reduce(stat)
        peak = fused.epoch_end()
        mae = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} mse {stat[0] / stat[1]:.3f} peak-norm {peak:.2f} test-mae {mae:.3f}", flush=True)
    if rank == 0:
        os.makedirs("out", exist_ok=True)
        torch.save(model.state_dict(), "out/regressor.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
