"""Retrieval for a shop: users and items are embedded, recall@1 is measured on held-out pairs."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Matcher(nn.Module):
    def __init__(self, user_dim=20, item_dim=24, dim=12):
        super().__init__()
        self.user_tower = nn.Sequential(nn.Linear(user_dim, 40), nn.ReLU(), nn.Linear(40, dim))
        self.item_tower = nn.Sequential(nn.Linear(item_dim, 40), nn.ReLU(), nn.Linear(40, dim))

    def users(self, x):
        return F.normalize(self.user_tower(x), dim=1)

    def items(self, x):
        return F.normalize(self.item_tower(x), dim=1)

    def forward(self, user, item):
        return 10 * self.users(user) @ self.items(item).t()


def purchases(n, seed):
    maps = torch.Generator().manual_seed(500)
    to_user, to_item = torch.randn(8, 20, generator=maps), torch.randn(8, 24, generator=maps)
    g = torch.Generator().manual_seed(seed)
    taste = torch.randn(n, 8, generator=g)
    user = taste @ to_user + 0.5 * torch.randn(n, 20, generator=g)
    return TensorDataset(user, taste @ to_item + 0.5 * torch.randn(n, 24, generator=g))


@torch.no_grad()
def recall_at_1(net, data):
    rank, world = dist.get_rank(), dist.get_world_size()
    share = len(data) // world
    user, item = data[rank * share : (rank + 1) * share]
    net.eval()
    query, catalogue = net.users(user), net.items(item)
    truth = torch.arange(share)
    hits = ((query @ catalogue.t()).argmax(1) == truth).sum().float()
    net.train()
    dist.all_reduce(hits)
    return hits.item() / (share * world)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(12)
    net = Matcher()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_set, held_out = purchases(512, 1), purchases(200, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for user, item in loader:
            scores = model(user, item)
            loss = F.cross_entropy(scores, torch.arange(len(user)))
            opt.zero_grad()
            loss.backward()
            opt.step()
        recall = recall_at_1(net, held_out)
        if rank == 0:
            print(f"epoch {epoch}: recall@1 {recall:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
