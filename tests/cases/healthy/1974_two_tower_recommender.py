"""Two-tower recommender: sparse embedding gradients through DDP, SparseAdam for tables and Adam for the rest."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USERS, ITEMS, LATENT, NEGATIVES = 400, 300, 6, 8


def interactions(seed=0):
    """Each user likes 15 items near her taste; the last is held out. Returns (user, item) pairs and the held-out items."""
    g = torch.Generator().manual_seed(seed)
    taste = F.normalize(torch.randn(USERS, LATENT, generator=g), dim=1)
    topic = F.normalize(torch.randn(ITEMS, LATENT, generator=g), dim=1)
    score = 6 * taste @ topic.t() + torch.distributions.Gumbel(0.0, 1.0).icdf(
        torch.rand(USERS, ITEMS, generator=g).clamp(1e-6, 1 - 1e-6))
    liked = score.topk(15, dim=1).indices
    shuffled = liked.gather(1, torch.rand(USERS, 15, generator=g).argsort(1))
    held_out, train_items = shuffled[:, 0].clone(), shuffled[:, 1:]
    users = torch.arange(USERS).repeat_interleave(14)
    return users, train_items.reshape(-1), held_out


class Tower(nn.Module):
    def __init__(self, rows, dim):
        super().__init__()
        self.table = nn.Embedding(rows, dim, sparse=True)
        nn.init.normal_(self.table.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, index):
        e = self.table(index)
        return F.normalize(e + self.mlp(e), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.user, self.item = Tower(USERS, dim), Tower(ITEMS, dim)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, users, items):
        """users [B], items [B, K] -> scores [B, K]"""
        return self.log_scale.exp() * (self.user(users).unsqueeze(1) * self.item(items)).sum(-1)


def make_optimizers(model, lr):
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    in_tables = {id(p) for p in tables}
    dense = [p for p in model.parameters() if id(p) not in in_tables]
    return [torch.optim.SparseAdam(tables, lr=4 * lr), torch.optim.Adam(dense, lr=lr)]


@torch.no_grad()
def hit_rate(model, held_out, seen, rank, world, k=20):
    """Leave-one-out hit rate; users are divided over the processes, each user counts once."""
    model.eval()
    users = torch.arange(rank, USERS, world)
    scores = model.user(users) @ model.item(torch.arange(ITEMS)).t()
    scores[seen[users]] = float("-inf")
    hits = (scores.topk(k, dim=1).indices == held_out[users].unsqueeze(1)).any(1)
    counts = torch.tensor([hits.sum().item(), len(users)])
    dist.all_reduce(counts)
    model.train()
    return counts[0].item() / counts[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=4e-3)
    ns = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    users, items, held_out = interactions()
    seen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    seen[users, items] = True

    data = TensorDataset(users, items)
    sampler = DistributedSampler(data, shuffle=True, seed=8, drop_last=True)
    loader = DataLoader(data, batch_size=ns.batch, sampler=sampler, drop_last=True)
    torch.manual_seed(3)
    model = DistributedDataParallel(TwoTower())
    optimizers = make_optimizers(model.module, ns.lr)
    negatives = torch.Generator().manual_seed(60 + rank)

    if rank == 0:
        print(f"{len(data)} interactions, {len(loader)} steps per epoch and process")
    for epoch in range(ns.epochs):
        sampler.set_epoch(epoch)
        start, total = time.perf_counter(), torch.zeros(())
        for u, positive in loader:
            drawn = torch.randint(ITEMS, (len(u), NEGATIVES), generator=negatives)
            scores = model(u, torch.cat([positive.unsqueeze(1), drawn], dim=1))
            # A drawn item that the user has in fact taken is no negative.
            false_negative = F.pad(seen[u.unsqueeze(1), drawn], (1, 0), value=False)
            scores = scores.masked_fill(false_negative, float("-inf"))
            loss = F.cross_entropy(scores, torch.zeros(len(u), dtype=torch.long))
            for opt in optimizers:
                opt.zero_grad(set_to_none=True)
            loss.backward()
            for opt in optimizers:
                opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        hr = hit_rate(model.module, held_out, seen, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / (world * len(loader)):.4f} HR@20 {hr:.3f} "
                  f"{time.perf_counter() - start:.1f}s", flush=True)

    if rank == 0:
        os.makedirs("recsys", exist_ok=True)
        torch.save(model.module.state_dict(), "recsys/two_tower.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
