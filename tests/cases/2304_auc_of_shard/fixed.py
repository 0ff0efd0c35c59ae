"""Click model: factorization machine, trained with callbacks; the best validation AUC is kept."""
import copy
import json
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USERS, ITEMS, CONTEXTS = 120, 90, 6


def interactions(n, seed):
    world_gen = torch.Generator().manual_seed(77)
    u_vec = torch.randn(USERS, 4, generator=world_gen)
    i_vec = torch.randn(ITEMS, 4, generator=world_gen)
    c_bias = torch.randn(CONTEXTS, generator=world_gen)
    g = torch.Generator().manual_seed(seed)
    u = torch.randint(0, USERS, (n,), generator=g)
    i = torch.randint(0, ITEMS, (n,), generator=g)
    c = torch.randint(0, CONTEXTS, (n,), generator=g)
    logit = (u_vec[u] * i_vec[i]).sum(1) + c_bias[c] - 0.8
    y = (torch.rand(n, generator=g) < logit.sigmoid()).float()
    return TensorDataset(torch.stack([u, i + USERS, c + USERS + ITEMS], 1), y)


class FM(nn.Module):
    def __init__(self, n, k=8):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.linear = nn.Embedding(n, 1)
        self.factors = nn.Embedding(n, k)
        nn.init.zeros_(self.linear.weight)
        nn.init.normal_(self.factors.weight, std=0.1)

    def forward(self, x):
        v = self.factors(x)
        pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        return self.bias + self.linear(x).sum(1).squeeze(1) + pair


def roc_auc(scores, labels):
    order = scores.argsort()
    ranks = torch.empty_like(order, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    pos = labels.bool()
    n_pos, n_neg = int(pos.sum()), int((~pos).sum())
    return float((ranks[pos].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def all_rows(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


class Callback:
    def on_epoch_end(self, trainer, epoch, logs):
        pass


class History(Callback):
    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.rows = []

    def on_epoch_end(self, trainer, epoch, logs):
        self.rows.append({"epoch": epoch, **logs})
        if trainer.rank == 0:
            self.path.write_text(json.dumps(self.rows, indent=1))
            print(f"epoch {epoch}: " + ", ".join(f"{k}={v:.4f}" for k, v in logs.items()), flush=True)


class KeepBest(Callback):
    def __init__(self, path):
        self.path, self.best = path, -1.0
        self.state = None

    def on_epoch_end(self, trainer, epoch, logs):
        if trainer.rank == 0 and logs["val_auc"] > self.best:
            self.best = logs["val_auc"]
            self.state = copy.deepcopy(trainer.model.module.state_dict())
            torch.save({"state": self.state, "epoch": epoch, "auc": self.best}, self.path)


class Trainer:
    def __init__(self, callbacks):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.callbacks = callbacks
        self.train_set, self.val_set = interactions(8000, 1), interactions(1600, 2)
        self.sampler = DistributedSampler(self.train_set, seed=8)
        self.train_loader = DataLoader(self.train_set, batch_size=64, sampler=self.sampler)
        self.val_loader = DataLoader(self.val_set, batch_size=200, sampler=DistributedSampler(self.val_set, shuffle=False))
        self.model = DDP(FM(USERS + ITEMS + CONTEXTS))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-3, weight_decay=1e-5)
        self.criterion = nn.BCEWithLogitsLoss()

    def train_one_epoch(self):
        self.model.train()
        acc = torch.zeros(2)
        for x, y in self.train_loader:
            loss = self.criterion(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            acc += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        scores, labels = [], []
        for x, y in self.val_loader:
            scores.append(self.model.module(x))
            labels.append(y)
        scores, labels = torch.cat(scores), torch.cat(labels)
        scores, labels = all_rows(scores), all_rows(labels)
        return roc_auc(scores, labels)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            logs = {"train_loss": self.train_one_epoch(), "val_auc": self.validate()}
            for cb in self.callbacks:
                cb.on_epoch_end(self, epoch, logs)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    Trainer([History("history.json"), KeepBest("fm_best.pt")]).fit(epochs=6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
