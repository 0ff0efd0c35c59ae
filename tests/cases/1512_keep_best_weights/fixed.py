"""Sales forecast with an early stop that goes back to the best weights."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def series(n, seed, window=16):
    g = torch.Generator().manual_seed(seed)
    phase = 6.2832 * torch.rand(n, 1, generator=g)
    t = torch.arange(window + 1).float()
    level = torch.sin(0.6 * t + phase) + 0.5 * torch.sin(1.7 * t + 2 * phase)
    noisy = level + 0.6 * torch.randn(n, window + 1, generator=g)
    return TensorDataset(noisy[:, :window], noisy[:, window:])


class BestWeights:
    def __init__(self, patience):
        self.patience = patience
        self.best, self.state, self.waited = float("inf"), None, 0

    def done(self, value, module):
        if value < self.best:
            self.best, self.waited = value, 0
            self.state = {k: v.clone() for k, v in module.state_dict().items()}
        else:
            self.waited += 1
        return self.waited > self.patience


def reduced_mse(net, loader):
    net.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            sums += torch.tensor([(net(x) - y).pow(2).sum().item(), len(y)], dtype=torch.float64)
    net.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--patience", type=int, default=5)
    ap.add_argument("--lr", type=float, default=6e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train_set, val_set = series(128, 1), series(150, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=50)
    keeper = BestWeights(args.patience)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        val = reduced_mse(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation {val:.4f}", flush=True)
        if keeper.done(val, net):
            break

    net.load_state_dict(keeper.state)
    final = reduced_mse(net, val_loader)
    if rank == 0:
        print(f"best {keeper.best:.4f}, restored model {final:.4f}", flush=True)
        torch.save(keeper.state, "forecast.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
