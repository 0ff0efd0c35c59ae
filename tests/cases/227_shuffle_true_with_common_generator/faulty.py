"""Matrix factorisation for ratings, with averaged gradients written by hand."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

USERS, ITEMS, K = 40, 30, 6


def ratings(n=480):
    g = torch.Generator().manual_seed(1)
    u, v = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    who = torch.randint(USERS, (n,), generator=g)
    what = torch.randint(ITEMS, (n,), generator=g)
    return TensorDataset(who, what, (u[who] * v[what]).sum(1) + 0.1 * torch.randn(n, generator=g))


class Factorisation(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, K), nn.Embedding(ITEMS, K)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.3)

    def forward(self, who, what):
        dot = (self.user(who) * self.item(what)).sum(1)
        return dot + self.user_bias(who).squeeze(1) + self.item_bias(what).squeeze(1)


def sync_gradients(net, world):
    work = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
    for w in work:
        w.wait()
    for p in net.parameters():
        p.grad /= world


def get_loader(dataset, rank, world, batch):
    g = torch.Generator()
    g.manual_seed(2024)
    return DataLoader(dataset, batch_size=batch, shuffle=True, generator=g, drop_last=True)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(5)
    net = Factorisation()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(net.parameters(), lr=2e-2)
    loader = get_loader(ratings(), rank, world, 16)
    for epoch in range(3):
        se = torch.zeros(2)
        for who, what, stars in loader:
            loss = nn.functional.mse_loss(net(who, what), stars)
            opt.zero_grad()
            loss.backward()
            sync_gradients(net, world)
            opt.step()
            se += torch.tensor([loss.item() * len(stars), len(stars)])
        dist.all_reduce(se)
        if rank == 0:
            print(f"epoch {epoch}: train rmse {(se[0] / se[1]).sqrt().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
