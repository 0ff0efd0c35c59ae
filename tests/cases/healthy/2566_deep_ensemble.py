"""Deep ensemble: one member per process, trained alone on its own bootstrap; predictions are pooled at the end."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def concrete(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 5, generator=g) * 2 - 1
    f = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.4 * x[:, 3].abs()
    noise = 0.05 + 0.25 * torch.sigmoid(4 * x[:, 4])
    return x, f + noise * torch.randn(n, generator=g)


class Member(nn.Module):
    """Predicts mean and log-variance; widths differ between members."""

    def __init__(self, width, dropout):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2),
        )

    def forward(self, x):
        mean, logvar = self.net(x).unbind(1)
        return mean, logvar.clamp(-6, 3)


def nll(mean, logvar, y):
    return 0.5 * (logvar + (y - mean) ** 2 / logvar.exp() + math.log(2 * math.pi)).mean()


def train_member(model, x, y, seed, args):
    g = torch.Generator().manual_seed(seed)
    boot = torch.randint(0, len(y), (len(y),), generator=g)
    out = torch.ones(len(y), dtype=torch.bool)
    out[boot] = False
    x_oob, y_oob = x[out], y[out]
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    best, state, bad = float("inf"), None, 0
    for epoch in range(args.epochs):
        model.train()
        for part in boot[torch.randperm(len(boot), generator=g)].split(args.batch_size):
            loss = nll(*model(x[part]), y[part])
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            oob = nll(*model(x_oob), y_oob).item()
        if oob < best - 1e-3:
            best, bad = oob, 0
            state = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            bad += 1
        if bad >= args.patience:
            break
    model.load_state_dict(state)
    model.eval()
    return epoch + 1, best


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--patience", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    x, y = concrete(1800, 0)
    tx, ty = concrete(500, 1)

    torch.manual_seed(100 + rank)
    model = Member(width=(48, 64, 80)[rank % 3], dropout=0.05)
    epochs, best = train_member(model, x, y, 200 + rank, args)
    torch.save(model.state_dict(), f"member{rank}.pt")

    with torch.no_grad():
        mean, logvar = model(tx)
    mine = torch.stack([mean, logvar.exp()])
    pool = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(pool, mine)
    pool = torch.stack(pool)
    mu = pool[:, 0].mean(0)
    var = (pool[:, 1] + pool[:, 0] ** 2).mean(0) - mu**2
    report = [None] * world
    dist.all_gather_object(report, (rank, epochs, round(best, 4), round(F.mse_loss(mean, ty).sqrt().item(), 4)))
    if rank == 0:
        for r, e, b, rm in report:
            print(f"member {r}: {e} epochs, out-of-bag nll {b}, test rmse {rm}")
        print(f"ensemble rmse {F.mse_loss(mu, ty).sqrt().item():.4f} nll {nll(mu, var.log(), ty).item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
