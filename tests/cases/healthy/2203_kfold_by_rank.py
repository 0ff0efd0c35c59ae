"""Three-fold cross-validation, one fold for each process; folds stop early on their own and meet only for the report."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

FOLDS, MAX_EPOCHS, PATIENCE = 3, 25, 3


def make_dataset(n=900, dim=10):
    gen = torch.Generator().manual_seed(8)
    x = torch.randn(n, dim, generator=gen)
    y = torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] + 0.2 * torch.randn(n, generator=gen)
    return TensorDataset(x, y.unsqueeze(-1))


def split_fold(dataset, fold):
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = set(order[fold::FOLDS])
    train = [i for i in order if i not in held_out]
    return Subset(dataset, train), Subset(dataset, sorted(held_out))


def fit(model, loader, optimizer):
    model.train()
    total = 0.0
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    return total / len(loader.dataset)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = sum(F.mse_loss(model(x), y, reduction="sum").item() for x, y in loader)
    return total / len(loader.dataset)


def train_fold(fold):
    train_set, valid_set = split_fold(make_dataset(), fold)
    torch.manual_seed(33)  # the folds shall differ by their data only
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    shuffle = torch.Generator().manual_seed(fold)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=shuffle)
    valid_loader = DataLoader(valid_set, batch_size=150)
    best, best_epoch, weights = float("inf"), -1, None
    for epoch in range(MAX_EPOCHS):
        train_loss = fit(model, train_loader, optimizer)
        valid_loss = validate(model, valid_loader)
        plateau.step(valid_loss)
        if valid_loss < best - 1e-4:
            best, best_epoch = valid_loss, epoch
            weights = {k: v.clone() for k, v in model.state_dict().items()}
        elif epoch - best_epoch >= PATIENCE:
            break
        if epoch % 5 == 0:
            print(f"fold {fold} epoch {epoch}: train {train_loss:.4f} valid {valid_loss:.4f}", flush=True)
    torch.save(weights, f"fold_{fold}.pt")
    return dict(fold=fold, valid=best, epoch=best_epoch, epochs_run=epoch + 1)


def worker(rank, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=FOLDS)
    result = train_fold(rank)
    results = [None] * FOLDS
    dist.all_gather_object(results, result)
    if rank == 0:
        scores = torch.tensor([r["valid"] for r in results])
        for r in results:
            print(f"fold {r['fold']}: best {r['valid']:.4f} at epoch {r['epoch']} of {r['epochs_run']}", flush=True)
        print(f"cross-validated mse {scores.mean():.4f} +- {scores.std():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(os.path.join(folder, "rendezvous"),), nprocs=FOLDS)
