"""Matrix factorisation for ratings; the learning rate follows the validation loss."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

USERS, ITEMS, DIM = 60, 80, 6


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        for emb in (self.user, self.item):
            nn.init.normal_(emb.weight, std=0.3)
        for emb in (self.user_bias, self.item_bias):
            nn.init.zeros_(emb.weight)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1) + (self.user_bias(u) + self.item_bias(i)).squeeze(1)


def make_ratings():
    g = torch.Generator().manual_seed(29)
    p, q = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    u = torch.randint(0, USERS, (3200,), generator=g)
    i = torch.randint(0, ITEMS, (3200,), generator=g)
    # odd records come from a survey with careless answers
    noise = torch.tensor([0.1, 0.9]).repeat(1600) * torch.randn(3200, generator=g)
    return u, i, (p[u] * q[i]).sum(1) + noise


def load_split(path, rank, world):
    if rank == 0:
        torch.save(make_ratings(), path)
    dist.barrier()
    u, i, r = torch.load(path)
    mine = slice(rank, None, world)
    train = [t[:2560] for t in (u, i, r)]
    valid = [t[2560:][mine] for t in (u, i, r)]
    return train, valid


def epoch_batches(train, epoch, rank, world, size):
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(epoch))
    for idx in order[rank::world].split(size):
        yield tuple(t[idx] for t in train)


def train_epoch(model, opt, batches):
    for u, i, r in batches:
        opt.zero_grad()
        nn.functional.mse_loss(model(u, i), r).backward()
        opt.step()


@torch.no_grad()
def validate(model, valid):
    """Mean squared error of the own part and of the whole validation set."""
    u, i, r = valid
    own = torch.stack([(model.module(u, i) - r).pow(2).sum(), torch.tensor(float(len(r)))])
    whole = own.clone()
    dist.all_reduce(whole)
    return (own[0] / own[1]).item(), (whole[0] / whole[1]).item()


def main(epochs=24):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    model = DDP(Factors())
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=1, threshold=5e-3)
    train, valid = load_split("ratings.pt", rank, world)
    for epoch in range(epochs):
        train_epoch(model, opt, epoch_batches(train, epoch, rank, world, size=128))
        own, val = validate(model, valid)
        plateau.step(own)
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch}: validation mse {val:.4f} (own part {own:.4f}), lr {opt.param_groups[0]['lr']:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "factors.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
