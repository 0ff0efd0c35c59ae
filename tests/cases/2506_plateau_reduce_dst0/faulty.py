"""House-price style tabular regression: embeddings + MLP, plateau scheduler, best checkpoint."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

N_NUM, N_CAT, CARD = 10, 3, 12


def make_table(n, seed):
    truth = torch.Generator().manual_seed(0)
    w = torch.randn(N_NUM, generator=truth)
    effect = torch.randn(N_CAT, CARD, generator=truth)
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, N_NUM, generator=g)
    cat = torch.randint(0, CARD, (n, N_CAT), generator=g)
    y = num @ w + 0.7 * num[:, 0] * num[:, 1] + sum(effect[j, cat[:, j]] for j in range(N_CAT))
    # later rows are noisier: prices of the last years
    noise = torch.linspace(0.4, 1.6, n) * torch.randn(n, generator=g)
    return TensorDataset(num, cat, (y + noise) / 4.0)


class TabNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(CARD, 6) for _ in range(N_CAT)])
        self.mlp = nn.Sequential(
            nn.Linear(N_NUM + 6 * N_CAT, hidden), nn.LayerNorm(hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, num, cat):
        e = [m(cat[:, j]) for j, m in enumerate(self.emb)]
        return self.mlp(torch.cat([num, *e], 1)).squeeze(1)


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        train, val = make_table(3000, 1), make_table(600, 2)
        self.sampler = DistributedSampler(train, seed=args.seed)
        self.loader = DataLoader(train, args.batch, sampler=self.sampler, drop_last=True)
        half = len(val) // self.world
        self.val = DataLoader(Subset(val, range(self.rank * half, (self.rank + 1) * half)), 100)
        self.model = DDP(TabNet())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.opt, factor=0.5, patience=1, threshold=1e-3, min_lr=1e-5)
        self.best = float("inf")

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        tot = torch.zeros(2)
        for num, cat, y in self.loader:
            loss = nn.functional.smooth_l1_loss(self.model(num, cat), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            tot += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(tot)
        return (tot[0] / tot[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        sse, seen = 0.0, 0
        for num, cat, y in self.val:
            sse += (self.model.module(num, cat) - y).pow(2).sum().item()
            seen += len(y)
        stats = torch.tensor([sse, float(seen)], dtype=torch.float64)
        dist.reduce(stats, dst=0)
        return (stats[0] / stats[1]).item()

    def save(self, epoch, val):
        path = os.path.join(self.args.out, "best.pt")
        torch.save({"epoch": epoch, "val": val, "model": self.model.module.state_dict()}, path)

    def run(self):
        history = []
        for epoch in range(self.args.epochs):
            train_loss = self.train_epoch(epoch)
            val = self.validate()
            self.sched.step(val)
            if self.rank == 0:
                if val < self.best:
                    self.best = val
                    self.save(epoch, val)
                lr = self.opt.param_groups[0]["lr"]
                history.append({"epoch": epoch, "train": train_loss, "val_mse": val, "lr": lr})
                print(f"{epoch:3d} train {train_loss:.4f} val_mse {val:.4f} lr {lr:.2e}", flush=True)
        if self.rank == 0:
            with open(os.path.join(self.args.out, "history.json"), "w") as f:
                json.dump(history, f)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--batch", type=int, default=50)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--out", default="tab_out")
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
    dist.barrier()
    Runner(args).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
