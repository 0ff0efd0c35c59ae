"""Four-fold cross-validation: every fold gets a fresh model, optimizer, scaler statistics and DDP wrapper."""
import csv

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

N, K, EPOCHS = 1200, 4, 3


def load_table():
    rng = np.random.default_rng(55)
    num = rng.normal(size=(N, 5)) * np.array([1, 10, 100, 0.1, 5]) + np.array([0, 3, 50, 1, -2])
    cat = rng.integers(0, 7, N)
    effect = rng.normal(size=7)
    z = (num - num.mean(0)) / num.std(0)
    y = z[:, 0] - 0.7 * z[:, 1] * z[:, 2] + effect[cat] + 0.2 * rng.normal(size=N)
    return (
        torch.tensor(num, dtype=torch.float32),
        torch.tensor(cat),
        torch.tensor(y, dtype=torch.float32),
    )


class TabNet(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.emb = nn.Embedding(7, 4)
        self.net = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, num, cat):
        return self.net(torch.cat([(num - self.mean) / self.std, self.emb(cat)], dim=1)).squeeze(1)


def exact_rmse(net, ds):
    """Every row once: rank r takes the rows r, r + world, ... without padding."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = Subset(ds, range(rank, len(ds), world))
    acc = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for num, cat, y in DataLoader(mine, batch_size=64):
            acc[0] += F.mse_loss(net(num, cat), y, reduction="sum").double()
            acc[1] += len(y)
    dist.all_reduce(acc)
    assert int(acc[1]) == len(ds)
    return (acc[0] / acc[1]).sqrt().item()


def run_fold(fold, train_ds, val_ds):
    num = torch.stack([train_ds[i][0] for i in range(len(train_ds))])
    torch.manual_seed(1000 + fold)
    net = TabNet(num.mean(0), num.std(0))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampler = DistributedSampler(train_ds, shuffle=True, seed=fold)
    dl = DataLoader(train_ds, batch_size=30, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for n, c, y in dl:
            loss = F.mse_loss(model(n, c), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    rmse = exact_rmse(net, val_ds)
    if dist.get_rank() == 0:
        torch.save({"fold": fold, "rmse": rmse, "model": net.state_dict()}, f"fold{fold}.pt")
    return rmse


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    full = TensorDataset(*load_table())
    order = np.random.default_rng(7).permutation(N)
    folds = np.array_split(order, K)

    scores = []
    for k in range(K):
        train_idx = np.concatenate([folds[j] for j in range(K) if j != k]).tolist()
        score = run_fold(k, Subset(full, train_idx), Subset(full, folds[k].tolist()))
        scores.append(score)
        if rank == 0:
            print(f"fold {k}: rmse {score:.4f}")
    dist.barrier()

    if rank == 0:
        print(f"cv rmse {np.mean(scores):.4f} +- {np.std(scores):.4f}")
        with open("cv.csv", "w", newline="") as f:
            csv.writer(f).writerows([("fold", "rmse"), *enumerate(scores)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
