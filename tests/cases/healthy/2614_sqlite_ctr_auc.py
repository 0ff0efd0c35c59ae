import atexit
import os
import sqlite3
from collections import OrderedDict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DB = "clicks.db"
ROWS, USERS, ITEMS = 6000, 200, 80


def build(path):
    rng = np.random.default_rng(11)
    u, v = rng.standard_normal((USERS, 4)), rng.standard_normal((ITEMS, 4))
    con = sqlite3.connect(path)
    con.execute("DROP TABLE IF EXISTS clicks")
    con.execute("CREATE TABLE clicks (id INTEGER PRIMARY KEY, user INT, item INT, hour REAL, price REAL, click INT)")
    rows = []
    for i in range(ROWS):
        a, b = int(rng.integers(USERS)), int(rng.integers(ITEMS))
        hour, price = float(rng.uniform(0, 24)), float(rng.lognormal(2, 0.7))
        logit = u[a] @ v[b] + np.sin(hour / 24 * 2 * np.pi) - 0.5 * (np.log(price) - 2)
        rows.append((i, a, b, hour, price, int(rng.random() < 1 / (1 + np.exp(-2 * logit)))))
    con.executemany("INSERT INTO clicks VALUES (?,?,?,?,?,?)", rows)
    con.commit()
    con.close()


class Clicks(Dataset):
    """Rows read from the data base by need; the last few thousand are kept in memory."""

    def __init__(self, path, low, high, keep=2000):
        self.path, self.low, self.high, self.keep = path, low, high, keep
        self.con = None
        self.recent = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self):
        return self.high - self.low

    def __getitem__(self, i):
        key = self.low + i
        row = self.recent.get(key)
        if row is None:
            self.misses += 1
            if self.con is None:
                self.con = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
            row = self.con.execute("SELECT user,item,hour,price,click FROM clicks WHERE id=?", (key,)).fetchone()
            self.recent[key] = row
            if len(self.recent) > self.keep:
                self.recent.popitem(last=False)
        else:
            self.hits += 1
            self.recent.move_to_end(key)
        return row


class Features:
    """Standardisation from rows of the whole train part: sums from all ranks."""

    def fit(self, data, rank, world):
        acc = torch.zeros(5, dtype=torch.float64)
        for i in range(rank, len(data), world):
            _, _, hour, price, _ = data[i]
            x = np.log(price)
            acc += torch.tensor([1.0, hour, hour * hour, x, x * x], dtype=torch.float64)
        dist.all_reduce(acc)
        n = acc[0]
        self.mean = torch.stack([acc[1] / n, acc[3] / n])
        self.std = (torch.stack([acc[2] / n, acc[4] / n]) - self.mean ** 2).sqrt()
        return self

    def __call__(self, rows):
        a = np.array(rows, dtype=np.float64)
        num = torch.from_numpy(np.stack([a[:, 2], np.log(a[:, 3])], 1))
        num = ((num - self.mean) / self.std).float()
        clock = torch.from_numpy(a[:, 2:3] / 24 * 2 * np.pi).float()
        return (torch.from_numpy(a[:, :2]).long(), torch.cat([num, clock.sin(), clock.cos()], 1),
                torch.from_numpy(a[:, 4]).float())


class FactorNet(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.item.weight, std=0.3)
        self.mlp = nn.Sequential(nn.Linear(2 * dim + 4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, ids, num):
        u, v = self.user(ids[:, 0]), self.item(ids[:, 1])
        return (u * v).sum(1) + self.mlp(torch.cat([u, v, num], 1)).squeeze(1)


def gather_ragged(t):
    n = torch.tensor([len(t)])
    sizes = [torch.zeros_like(n) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, n)
    longest = int(max(sizes))
    padded = torch.cat([t, t.new_zeros(longest - len(t))])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([p[:int(s)] for p, s in zip(parts, sizes)])


def auc(score, label):
    order = score.argsort()
    ranks = torch.empty(len(score), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    pos = label > 0.5
    np_, nn_ = pos.sum().item(), (~pos).sum().item()
    return ((ranks[pos].sum() - np_ * (np_ + 1) / 2) / (np_ * nn_)).item()


@torch.no_grad()
def evaluate(net, data, feats, rank, world):
    net.eval()
    mine = range(rank, len(data), world)
    scores, labels = [], []
    for k in range(0, len(mine), 128):
        ids, num, y = feats([data[i] for i in mine[k:k + 128]])
        scores.append(net(ids, num))
        labels.append(y)
    net.train()
    return auc(gather_ragged(torch.cat(scores)), gather_ragged(torch.cat(labels)))


def main():
    dist.init_process_group("gloo")
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        if os.path.exists(DB):
            os.remove(DB)
        build(DB)
    dist.barrier()
    train, test = Clicks(DB, 0, 4800), Clicks(DB, 4800, 5951)
    feats = Features().fit(train, rank, world)
    torch.manual_seed(2)
    model = DDP(FactorNet())
    torch.manual_seed(20 + rank)
    sampler = DistributedSampler(train, seed=9, drop_last=True)
    loader = DataLoader(train, batch_size=64, sampler=sampler, collate_fn=feats, drop_last=True)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max", factor=0.3, patience=1)
    best, bad = 0.0, 0
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for ids, num, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids, num), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = evaluate(model.module, test, feats, rank, world)
        plateau.step(score)
        bad = 0 if score > best + 1e-4 else bad + 1
        best = max(best, score)
        if rank == 0:
            print(f"epoch {epoch} AUC {score:.4f} lr {opt.param_groups[0]['lr']:.4f} hits {train.hits} misses {train.misses}", flush=True)
        stop = torch.tensor([bad >= 3], dtype=torch.int32)
        dist.broadcast(stop, src=0)
        if stop.item():
            break


if __name__ == "__main__":
    main()
