"""Time-series forecaster; the main process logs and keeps the best weights."""
import csv
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK = os.environ.get("RANK", 0)


def is_main_process():
    return RANK == 0


def waves(n=220, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(25)
    f = 0.1 + 0.4 * torch.rand(n, 1, generator=g)
    s = torch.sin(f * t + 6.28 * torch.rand(n, 1, generator=g)) + 0.05 * torch.randn(n, 25, generator=g)
    return TensorDataset(s[:, :24], s[:, 24:])


class Forecaster(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.fc(self.gru(x.unsqueeze(-1))[0][:, -1])


def evaluate(model, loader):
    model.eval()
    err = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            err += torch.tensor([(model(x) - y).pow(2).sum().item(), len(x)])
    dist.all_reduce(err)
    return (err[0] / err[1]).item()


def main(epochs=4):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DDP(Forecaster())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, val = waves(220, 1), waves(60, 2)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=20, sampler=sampler)
    val_loader = DataLoader(val, batch_size=20, sampler=DistributedSampler(val, shuffle=False))
    best = float("inf")
    rows = []
    for epoch in range(epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        mse = evaluate(model, val_loader)
        rows.append((epoch, mse))
        if is_main_process():
            print(f"epoch {epoch} val mse {mse:.4f}", flush=True)
            if mse < best:
                best = mse
                torch.save(model.module.state_dict(), "forecaster_best.pt")
    if is_main_process():
        with open("history.csv", "w", newline="") as f:
            csv.writer(f).writerows([("epoch", "mse"), *rows])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
