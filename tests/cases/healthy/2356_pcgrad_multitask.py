"""Multi-task regression/classification with gradient surgery (PCGrad), gradients averaged by hand before it."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class MultiTask(nn.Module):
    def __init__(self, dim=18):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"value": nn.Linear(64, 1), "kind": nn.Linear(64, 4), "flag": nn.Linear(64, 1)})

    def forward(self, x):
        z = self.trunk(x)
        return {k: h(z) for k, h in self.heads.items()}


class World:
    def __init__(self, seed, dim=18):
        t = torch.Generator().manual_seed(1)
        self.wv = torch.randn(dim, generator=t) / dim ** 0.5
        self.wk = torch.randn(dim, 4, generator=t)
        self.wf = torch.randn(dim, 2, generator=t) / dim ** 0.5
        self.gen, self.dim = torch.Generator().manual_seed(seed), dim

    def batch(self, n):
        x = torch.randn(n, self.dim, generator=self.gen)
        p = x @ self.wf
        return x, {"value": torch.sin(2 * x @ self.wv)[:, None],
                   "kind": (x @ self.wk).argmax(1),
                   "flag": ((p[:, 0] * p[:, 1]) > 0).float()[:, None]}


LOSS = {"value": F.mse_loss, "kind": F.cross_entropy, "flag": F.binary_cross_entropy_with_logits}


class PCGrad:
    def __init__(self, model, world, seed):
        self.params = list(model.parameters())
        self.world = world
        self.gen = torch.Generator().manual_seed(seed)      # the projection order is drawn alike on all ranks
        self.conflicts = 0

    def flat_grads(self, losses):
        rows = []
        for i, loss in enumerate(losses):
            grads = torch.autograd.grad(loss, self.params, retain_graph=i + 1 < len(losses), allow_unused=True)
            rows.append(torch.cat([(g if g is not None else torch.zeros_like(p)).reshape(-1)
                                   for g, p in zip(grads, self.params)]))
        return torch.stack(rows)

    def backward(self, losses):
        rows = self.flat_grads(losses)
        dist.all_reduce(rows)
        rows /= self.world
        merged = torch.zeros_like(rows[0])
        for i in range(len(rows)):
            g = rows[i].clone()
            for j in torch.randperm(len(rows), generator=self.gen).tolist():
                if i == j:
                    continue
                dot = g @ rows[j]
                if dot < 0:
                    g -= dot / rows[j].pow(2).sum().clamp_min(1e-12) * rows[j]
                    self.conflicts += 1
            merged += g
        at = 0
        for p in self.params:
            p.grad = merged[at:at + p.numel()].view_as(p).clone()
            at += p.numel()


def evaluate(model, rank, world):
    model.eval()
    with torch.no_grad():
        x, y = World(seed=400 + rank).batch(1500)
        out = model(x)
        stat = torch.stack([F.mse_loss(out["value"], y["value"]),
                            (out["kind"].argmax(1) == y["kind"]).float().mean(),
                            ((out["flag"] > 0).float() == y["flag"]).float().mean()]) / world
    dist.all_reduce(stat)
    model.train()
    return stat.tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=900)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(13)
    model = MultiTask()
    surgeon = PCGrad(model, world, seed=2)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps, eta_min=1e-5)
    source = World(seed=40 + rank)
    for step in range(args.steps):
        x, y = source.batch(args.batch)
        out = model(x)
        losses = [LOSS[k](out[k], y[k]) for k in LOSS]
        surgeon.backward(losses)
        opt.step()
        sched.step()
        if step % 150 == 0:
            v = torch.stack(losses).detach() / world
            dist.all_reduce(v)
            if rank == 0:
                text = " ".join(f"{k} {val:.3f}" for k, val in zip(LOSS, v.tolist()))
                print(f"step {step:4d} {text} conflicts so far {surgeon.conflicts}", flush=True)

    mse, kind, flag = evaluate(model, rank, world)
    if rank == 0:
        print(f"value mse {mse:.3f} kind acc {kind:.3f} flag acc {flag:.3f}")
        torch.save(model.state_dict(), "multitask.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
