"""Five-fold cross-validation, folds dealt out to the ranks (one rank gets three of them, the other two)."""
import copy
import json
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Options:
    folds: int = 5
    rows: int = 2500
    batch: int = 50
    max_epochs: int = 25
    patience: int = 4
    lr: float = 2e-3


def table(n, seed=8):
    rng = np.random.default_rng(seed)
    num = rng.normal(size=(n, 6)) * np.array([1, 20, 0.1, 3, 1, 5]) + np.array([0, 100, 0, -3, 2, 0])
    cat = rng.integers(0, 8, size=n)
    effect = rng.normal(size=8)
    z = (num - num.mean(0)) / num.std(0)
    y = 1.5 * z[:, 0] * z[:, 1] + np.sin(2 * z[:, 2]) + effect[cat] + 0.2 * rng.normal(size=n)
    return (torch.tensor(num, dtype=torch.float32), torch.tensor(cat), torch.tensor(y, dtype=torch.float32))


class TabNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.mlp = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, num, cat):
        return self.mlp(torch.cat([num, self.emb(cat)], 1)).squeeze(1)


class FoldRun:
    def __init__(self, fold, opts, data, assignment):
        self.fold, self.opts = fold, opts
        num, cat, y = data
        self.test = (assignment == fold).nonzero().flatten()
        rest = (assignment != fold).nonzero().flatten()
        g = torch.Generator().manual_seed(100 + fold)
        rest = rest[torch.randperm(len(rest), generator=g)]
        cut = len(rest) // 8
        self.inner, self.fit_rows = rest[:cut], rest[cut:]      # early stopping never looks at the test fold
        mean, std = num[self.fit_rows].mean(0), num[self.fit_rows].std(0)
        self.num, self.cat, self.y = (num - mean) / std, cat, y
        self.gen = g
        torch.manual_seed(fold)
        self.net = TabNet()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=opts.lr)

    def epoch(self):
        self.net.train()
        order = self.fit_rows[torch.randperm(len(self.fit_rows), generator=self.gen)]
        for rows in order.split(self.opts.batch):
            loss = (self.net(self.num[rows], self.cat[rows]) - self.y[rows]).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def predict(self, rows):
        self.net.eval()
        return self.net(self.num[rows], self.cat[rows])

    def run(self):
        best, best_state, wait, epoch = float("inf"), None, 0, 0
        for epoch in range(self.opts.max_epochs):
            self.epoch()
            mse = (self.predict(self.inner) - self.y[self.inner]).pow(2).mean().item()
            if mse < best - 1e-4:
                best, best_state, wait = mse, copy.deepcopy(self.net.state_dict()), 0
            else:
                wait += 1
                if wait >= self.opts.patience:
                    break
        self.net.load_state_dict(best_state)
        return epoch + 1, best


def main():
    opts = Options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = table(opts.rows)
    assignment = torch.randperm(opts.rows, generator=torch.Generator().manual_seed(0)) % opts.folds

    oof = torch.zeros(opts.rows)
    filled = torch.zeros(opts.rows)
    report = {}
    for fold in range(rank, opts.folds, world):
        run = FoldRun(fold, opts, data, assignment)
        epochs, inner = run.run()
        oof[run.test] = run.predict(run.test)
        filled[run.test] += 1
        report[fold] = {"epochs": epochs, "inner_mse": round(inner, 4)}
        print(f"[rank {rank}] fold {fold} stopped after {epochs} epochs, inner mse {inner:.4f}", flush=True)

    dist.all_reduce(oof)
    dist.all_reduce(filled)
    parts = [None] * world if rank == 0 else None
    dist.gather_object(report, parts, dst=0)
    if rank == 0:
        assert bool((filled == 1).all())
        y = data[2]
        r2 = 1 - ((oof - y).pow(2).sum() / (y - y.mean()).pow(2).sum()).item()
        merged = {k: v for part in parts for k, v in part.items()}
        with open("cv.json", "w") as f:
            json.dump({"r2": r2, "folds": merged}, f, indent=1, sort_keys=True)
        print(f"out-of-fold r2 {r2:.3f} over {len(merged)} folds")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
