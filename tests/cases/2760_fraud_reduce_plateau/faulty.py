"""Fraud detection on tabular rows: id embeddings (SGD) + dense tower (Adam), gradients reduced by post-accumulate hooks."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Sampler, TensorDataset

N_MERCHANTS, N_COUNTRIES, N_NUM = 300, 24, 10


def make_rows(n, seed):
    world = torch.Generator().manual_seed(77)
    m_risk = torch.randn(N_MERCHANTS, generator=world)
    c_risk = torch.randn(N_COUNTRIES, generator=world)
    w = torch.randn(N_NUM, generator=world) * 0.6
    g = torch.Generator().manual_seed(seed)
    merchant = torch.randint(0, N_MERCHANTS, (n,), generator=g)
    country = torch.randint(0, N_COUNTRIES, (n,), generator=g)
    num = torch.randn(n, N_NUM, generator=g)
    score = m_risk[merchant] + 0.8 * c_risk[country] + num @ w + m_risk[merchant] * num[:, 0] - 4.0
    y = (torch.rand(n, generator=g) < score.sigmoid()).float()
    return TensorDataset(merchant, country, num, y)


class BalancedShard(Sampler):
    """Equal number of positives and negatives per epoch, disjoint over processes."""

    def __init__(self, labels, rank, world, seed):
        self.pos, self.neg = labels.nonzero().flatten(), (labels == 0).nonzero().flatten()
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0
        self.half = min(len(self.pos), len(self.neg)) // world

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 2 * self.half

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        pos = self.pos[torch.randperm(len(self.pos), generator=g)][: self.half * self.world]
        neg = self.neg[torch.randperm(len(self.neg), generator=g)][: self.half * self.world]
        mine = torch.cat([pos[self.rank::self.world], neg[self.rank::self.world]])
        return iter(mine[torch.randperm(len(mine), generator=g)].tolist())


class FraudNet(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.merchant = nn.Embedding(N_MERCHANTS, d)
        self.country = nn.Embedding(N_COUNTRIES, d)
        self.tower = nn.Sequential(nn.Linear(2 * d + N_NUM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        for e in (self.merchant, self.country):
            nn.init.normal_(e.weight, std=0.05)

    def forward(self, m, c, num):
        return self.tower(torch.cat([self.merchant(m), self.country(c), num], 1)).squeeze(1)


class GradReducer:
    """Averages every gradient over the processes as soon as it is ready, overlapped with backward."""

    def __init__(self, module):
        self.world = dist.get_world_size()
        self.pending = []
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, p):
        p.grad.div_(self.world)
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


@torch.no_grad()
def validate(net, loader, threshold=0.5):
    net.eval()
    stats = torch.zeros(5, dtype=torch.float64)  # tp, fp, fn, loss, n
    for m, c, num, y in loader:
        logit = net(m, c, num)
        hit = logit.sigmoid() > threshold
        stats[0] += (hit & (y == 1)).sum()
        stats[1] += (hit & (y == 0)).sum()
        stats[2] += (~hit & (y == 1)).sum()
        stats[3] += F.binary_cross_entropy_with_logits(logit, y, reduction="sum")
        stats[4] += len(y)
    dist.reduce(stats, dst=0)
    net.train()
    tp, fp, fn, loss, n = stats.tolist()
    return {"f1": 2 * tp / max(2 * tp + fp + fn, 1), "precision": tp / max(tp + fp, 1),
            "recall": tp / max(tp + fn, 1), "loss": loss / n}


def run(rank, world, epochs=12, batch=64):
    torch.manual_seed(21)
    net = FraudNet()
    reducer = GradReducer(net)
    train, val = make_rows(30000, 1), make_rows(1500, 2)
    sampler = BalancedShard(train.tensors[-1], rank, world, seed=6)
    train_loader = DataLoader(train, batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 512, sampler=range(rank, len(val), world))

    emb_params = [*net.merchant.parameters(), *net.country.parameters()]
    optimizers = [torch.optim.SGD(emb_params, lr=2.0), torch.optim.Adam(net.tower.parameters(), lr=3e-3)]
    plateaus = [ReduceLROnPlateau(o, mode="max", factor=0.6, patience=0, threshold=2e-3) for o in optimizers]
    best = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        started, total = time.perf_counter(), torch.zeros(())
        for m, c, num, y in train_loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logit = net(m, c, num)
            loss = F.binary_cross_entropy_with_logits(logit.float(), y)
            for o in optimizers:
                o.zero_grad(set_to_none=True)
            loss.backward()
            reducer.wait()
            for o in optimizers:
                o.step()
            total += loss.detach()
        metrics = validate(net, val_loader)
        for s in plateaus:
            s.step(metrics["f1"])
        dist.all_reduce(total)
        if rank == 0:
            lrs = "/".join(f"{o.param_groups[0]['lr']:.3g}" for o in optimizers)
            shown = " ".join(f"{k} {v:.4f}" for k, v in metrics.items())
            print(f"epoch {epoch} train {total.item() / world / len(train_loader):.4f} {shown} lr {lrs} "
                  f"{time.perf_counter() - started:.1f}s", flush=True)
            if metrics["f1"] > best:
                best = metrics["f1"]
                torch.save({"net": net.state_dict(), "epoch": epoch, "f1": best}, "fraud_best.pt")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
