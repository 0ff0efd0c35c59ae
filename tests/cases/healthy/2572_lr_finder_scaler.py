"""Learning-rate range test before training, then DDP with float16 autocast, GradScaler('cpu') and stop by agreement."""
import copy
import math
import os
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Plan:
    dim: int = 30
    width: int = 96
    batch: int = 48
    epochs: int = 10
    patience: int = 2
    seed: int = 0
    lr: float = 0.0


def machines(n=3200):
    g = torch.Generator().manual_seed(61)
    x = torch.randn(n, 30, generator=g)
    w1, w2 = torch.randn(30, 6, generator=g) / 3, torch.randn(6, generator=g)
    return x, ((torch.relu(x @ w1) @ w2) + 0.3 * torch.randn(n, generator=g) > 0.4).float()


def network(plan):
    torch.manual_seed(plan.seed)
    return nn.Sequential(nn.Linear(plan.dim, plan.width), nn.ReLU(), nn.Linear(plan.width, plan.width), nn.ReLU(), nn.Linear(plan.width, 1))


def range_test(model, x, y, plan, low=1e-4, high=3.0, steps=40):
    """Sweeps the rate up on the shared replicas, then puts everything back."""
    keep = copy.deepcopy(model.state_dict())
    opt = torch.optim.SGD(model.parameters(), lr=low, momentum=0.9)
    g = torch.Generator().manual_seed(dist.get_rank())
    smooth, lowest, best = None, float("inf"), low
    for i in range(steps):
        lr = low * (high / low) ** (i / (steps - 1))
        opt.param_groups[0]["lr"] = lr
        pick = torch.randint(0, len(y), (plan.batch,), generator=g)
        loss = F.binary_cross_entropy_with_logits(model(x[pick]).squeeze(1), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean = mean.item() / dist.get_world_size()
        smooth = mean if smooth is None else 0.7 * smooth + 0.3 * mean
        if not math.isfinite(smooth) or smooth > 3 * lowest:
            break
        if smooth < lowest:
            lowest, best = smooth, lr
    model.load_state_dict(keep)
    model.zero_grad()
    return best / 4


@torch.no_grad()
def validate(net, x, y):
    net.eval()
    z = net(x).squeeze(1)
    net.train()
    s = torch.stack([F.binary_cross_entropy_with_logits(z, y, reduction="sum"), ((z > 0) == (y > 0.5)).sum().float(), torch.tensor(float(len(y)))])
    dist.all_reduce(s)
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


@record
def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [Plan(seed=int(os.environ.get("SEED", 5))) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    plan = box[0]

    shards = None
    if rank == 0:
        order = torch.randperm(3200, generator=torch.Generator().manual_seed(plan.seed))
        shards = [(order[:2560][r::world], order[2560:][r::world]) for r in range(world)]
    mine = [None]
    dist.scatter_object_list(mine, shards, src=0)
    train_idx, val_idx = mine[0]
    x, y = machines()
    xt, yt, xv, yv = x[train_idx], y[train_idx], x[val_idx], y[val_idx]
    dist.monitored_barrier(timeout=timedelta(seconds=60))

    model = DDP(network(plan))
    plan.lr = range_test(model, xt, yt, plan)
    if rank == 0:
        print("plan", asdict(plan), flush=True)
    opt = torch.optim.SGD(model.parameters(), lr=plan.lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    g = torch.Generator().manual_seed(1000 + rank)
    best, bad = float("inf"), 0
    for epoch in range(plan.epochs):
        for pick in torch.randperm(len(yt), generator=g).split(plan.batch):
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(xt[pick]).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits.float(), yt[pick])
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            scaler.step(opt)
            scaler.update()
        val, acc = validate(model.module, xv, yv)
        if rank == 0:
            print(f"epoch {epoch} val {val:.4f} acc {acc:.3f} scale {scaler.get_scale():.0f}", flush=True)
        best, bad = (val, 0) if val < best else (best, bad + 1)
        if bad >= plan.patience:
            break
    dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "machines.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
