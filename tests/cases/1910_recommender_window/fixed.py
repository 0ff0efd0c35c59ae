"""Matrix factorisation with side features; several micro-batches make one update."""
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Ratings(Dataset):
    def __init__(self, n=2080, users=80, items=120, seed=4):
        g = torch.Generator().manual_seed(seed)
        self.user = torch.randint(0, users, (n,), generator=g)
        self.item = torch.randint(0, items, (n,), generator=g)
        u = torch.randn(users, 4, generator=g)
        v = torch.randn(items, 4, generator=g)
        self.age = torch.rand(n, 1, generator=g)
        score = (u[self.user] * v[self.item]).sum(1) + self.age[:, 0]
        self.score = score + 0.1 * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.score)

    def __getitem__(self, i):
        return self.user[i], self.item[i], self.age[i], self.score[i]


class Factoriser(nn.Module):
    def __init__(self, users=80, items=120, dim=24):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim + 1, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, user, item, age):
        u, v = self.user(user), self.item(item)
        return (u * v).sum(1) / 4 + self.mlp(torch.cat([u, v, age], 1)).squeeze(1)


class Accumulator:
    """Runs micro-batches through the model and steps when a window is full."""

    def __init__(self, model, optimizer, window):
        self.model, self.optimizer, self.window = model, optimizer, window
        self.updates = 0

    def epoch(self, loader):
        n = len(loader)
        total = torch.zeros(2)
        for i, (user, item, age, score) in enumerate(loader):
            size = self.window if i < n - n % self.window else n % self.window
            full = (i + 1) % self.window == 0 or i + 1 == n
            with nullcontext() if full else self.model.no_sync():
                loss = nn.functional.mse_loss(self.model(user, item, age), score)
                (loss / size).backward()
            if full:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.updates += 1
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        return (total[0] / total[1]).item(), n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--micro-batch", type=int, default=40)
    ap.add_argument("--window", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(6)

    data = Ratings()
    sampler = DistributedSampler(data, seed=6)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler)
    model = DDP(Factoriser())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    runner = Accumulator(model, optimizer, args.window)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mse, micro = runner.epoch(loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mse {mse:.4f} after {runner.updates} updates ({micro} micro-batches)", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
