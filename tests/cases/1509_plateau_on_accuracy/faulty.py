"""Churn prediction on tabular data; the learning rate follows the validation accuracy."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def customers(n, seed):
    g = torch.Generator().manual_seed(seed)
    region = torch.randint(0, 8, (n,), generator=g)
    numbers = torch.randn(n, 10, generator=g)
    score = numbers[:, 0] * numbers[:, 1] + numbers[:, 2].sin() + 0.3 * (region % 3) + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(region, numbers, (score > 0.3).long())


class Churn(nn.Module):
    def __init__(self):
        super().__init__()
        self.region = nn.Embedding(8, 4)
        self.mlp = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, region, numbers):
        return self.mlp(torch.cat([self.region(region), numbers], 1))


def train(model, loader, opt):
    model.train()
    for region, numbers, churned in loader:
        loss = nn.functional.cross_entropy(model(region, numbers), churned)
        opt.zero_grad()
        loss.backward()
        opt.step()


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    hits = torch.zeros(2)
    for region, numbers, churned in loader:
        hits += torch.tensor([(net(region, numbers).argmax(1) == churned).sum().item(), len(churned)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--patience", type=int, default=1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    net = Churn()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = ReduceLROnPlateau(opt, factor=0.3, patience=args.patience)

    train_set, val_set = customers(480, 1), customers(201, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=24, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=64)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, loader, opt)
        val_acc = accuracy(net, val_loader)
        sched.step(val_acc)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {val_acc:.3f}, lr {opt.param_groups[0]['lr']:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
