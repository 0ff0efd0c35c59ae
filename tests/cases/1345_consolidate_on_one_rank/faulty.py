"""Sharded optimizer states on a wide matching network."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pairs(n=400, users=40, items=60):
    g = torch.Generator().manual_seed(33)
    taste, style = torch.randn(users, 4, generator=g), torch.randn(items, 4, generator=g)
    u = torch.randint(0, users, (n,), generator=g)
    i = torch.randint(0, items, (n,), generator=g)
    return TensorDataset(u, i, ((taste[u] * style[i]).sum(1) > 0).float())


class Match(nn.Module):
    def __init__(self, users=40, items=60, dim=32):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.score = nn.Sequential(nn.Linear(3 * dim, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return self.score(torch.cat([a, b, a * b], 1)).squeeze(1)


def save(path, model, optimizer, epoch):
    if dist.get_rank() == 0:
        optimizer.consolidate_state_dict(to=0)
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=2)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Match())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=args.lr)
    data = pairs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for u, i, like in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(u, i), like)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
        if (epoch + 1) % args.save_every == 0:
            save("match.pt", model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
