"""Energy demand regression with a held-out part."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def demand(n=420):
    g = torch.Generator().manual_seed(64)
    hour, day, temp = torch.rand(n, generator=g) * 24, torch.randint(0, 7, (n,), generator=g), torch.randn(n, generator=g)
    y = (hour / 24 * 6.28).sin() + 0.3 * (day < 5) - 0.5 * temp + 0.1 * torch.randn(n, generator=g)
    x = torch.stack([(hour / 24 * 6.28).sin(), (hour / 24 * 6.28).cos(), day.float() / 7, temp], 1)
    return TensorDataset(x, y[:, None])


def split(dataset, held_out, seed):
    rng = torch.Generator()
    rng.manual_seed(seed)
    order = torch.randperm(len(dataset), generator=rng).tolist()
    cut = int(len(order) * held_out)
    return Subset(dataset, order[cut:]), Subset(dataset, order[:cut])


@torch.no_grad()
def validate(model, loader):
    model.eval()
    acc = torch.zeros(2)
    for x, y in loader:
        acc += torch.tensor([(model(x) - y).pow(2).sum().item(), float(len(y))])
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).sqrt().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--held-out", type=float, default=0.2)
    ap.add_argument("--seed", type=int, default=21)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    train_set, val_set = split(demand(), args.held_out, args.seed)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train = DataLoader(train_set, batch_size=14, sampler=sampler)
    val = DataLoader(val_set, batch_size=42, sampler=DistributedSampler(val_set, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in train:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        rmse = validate(model, val)
        if rank == 0:
            print(f"epoch {epoch}: validation rmse {rmse:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
