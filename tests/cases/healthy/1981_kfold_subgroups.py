"""Two folds at a time: four processes in two groups; each group trains one fold's model with DDP. Run with `python`.

The processes meet through a file. Models of different groups are different on purpose; they form an ensemble at the end.
"""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GROUPS = 2
GROUP_SIZE = 2
WORLD = GROUPS * GROUP_SIZE
FOLDS = 4
EPOCHS = 4
BATCH = 20


def friedman(n, seed):
    """The Friedman-1 regression problem, centred."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 10, generator=g)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, (y + torch.randn(n, generator=g) - 14.4) / 5


def fold_indices(n, fold):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(123))
    parts = order.chunk(FOLDS)
    rest = torch.cat([p for i, p in enumerate(parts) if i != fold])
    return rest.tolist(), parts[fold].tolist()


def build(fold):
    torch.manual_seed(10 + fold)
    return nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))


@torch.no_grad()
def fold_mse(model, x, y, indices, group, group_rank):
    model.eval()
    mine = indices[group_rank::GROUP_SIZE]
    sums = torch.tensor([(model(x[mine]).squeeze(1) - y[mine]).pow(2).sum().item(), len(mine)], dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    model.train()
    return (sums[0] / sums[1]).item()


def train_fold(fold, x, y, group, group_rank):
    train_idx, val_idx = fold_indices(len(x), fold)
    train_set = Subset(TensorDataset(x, y), train_idx)
    # The data is divided inside the group, not over the whole world.
    sampler = DistributedSampler(train_set, num_replicas=GROUP_SIZE, rank=group_rank, shuffle=True, seed=fold, drop_last=True)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(build(fold), process_group=group)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    history = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for xb, yb in loader:
            loss = nn.functional.mse_loss(ddp(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        history.append((total.item() / (len(loader) * GROUP_SIZE), fold_mse(ddp.module, x, y, val_idx, group, group_rank)))
    return ddp.module, history


def worker(rank, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    # All processes create all groups, in the same order, also those they are not in.
    members = [list(range(k * GROUP_SIZE, (k + 1) * GROUP_SIZE)) for k in range(GROUPS)]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = rank // GROUP_SIZE
    group, group_rank = groups[mine], rank % GROUP_SIZE

    x, y = friedman(960, seed=0)
    for fold in range(mine, FOLDS, GROUPS):
        model, history = train_fold(fold, x, y, group, group_rank)
        if group_rank == 0:
            torch.save(model.state_dict(), f"fold{fold}.pt")
            print(f"fold {fold}: " + " | ".join(f"train {a:.3f} val {b:.3f}" for a, b in history), flush=True)

    dist.barrier()  # of the world: the files of all folds are written
    models = []
    for fold in range(FOLDS):
        model = build(fold)
        model.load_state_dict(torch.load(f"fold{fold}.pt", map_location="cpu", weights_only=True))
        models.append(model.eval())
    x_test, y_test = friedman(403, seed=1)
    part = slice(rank, None, WORLD)
    with torch.no_grad():
        predictions = torch.stack([m(x_test[part]).squeeze(1) for m in models])
    target = y_test[part]
    sums = torch.cat([(predictions - target).pow(2).sum(1), (predictions.mean(0) - target).pow(2).sum().view(1),
                      torch.tensor([float(len(target))])]).double()
    dist.all_reduce(sums)
    if rank == 0:
        mse = (sums[:-1] / sums[-1]).tolist()
        print("test mse: " + ", ".join(f"fold {i} {v:.3f}" for i, v in enumerate(mse[:-1])) + f", ensemble {mse[-1]:.3f}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory(dir=".") as folder:
        # The file itself must not exist yet: the first process creates it.
        rendezvous = os.path.join(os.path.abspath(folder), "rendezvous")
        mp.spawn(worker, args=(rendezvous,), nprocs=WORLD, join=True)


if __name__ == "__main__":
    main()
