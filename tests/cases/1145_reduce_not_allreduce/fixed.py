"""Survival-like regression; the learning rate follows the validation loss."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 10


def patients(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    risk = 0.8 * x[:, 0] - 0.5 * x[:, 1] + 0.3 * x[:, 2] * x[:, 3]
    time = -torch.log(torch.rand(n, generator=g)) / risk.exp()
    return TensorDataset(x, time)


def nll(log_rate, time):
    return log_rate.exp() * time - log_rate


def fit_epoch(model, loader, opt):
    for x, time in loader:
        loss = nll(model(x).squeeze(1), time).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


@torch.no_grad()
def validation_loss(net, loader):
    sums = torch.zeros(2)
    for x, time in loader:
        values = nll(net(x).squeeze(1), time)
        sums += torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


dist.init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(9, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
model = DDP(net)
opt = torch.optim.Adam(model.parameters(), lr=2e-2)
plateau = ReduceLROnPlateau(opt, factor=0.3, patience=0)
train_set, val_set = patients(256, 1), patients(120, 2)
sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=30)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    fit_epoch(model, train_loader, opt)
    val = validation_loss(net, val_loader)
    plateau.step(val)
    if rank == 0:
        print(f"epoch {epoch}: val {val:.4f}, lr {opt.param_groups[0]['lr']:.5f}", flush=True)
dist.destroy_process_group()
