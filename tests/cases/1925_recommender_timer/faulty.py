"""Matrix factorisation with biases; the hold-out error is measured from time to time and the model is kept."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Ratings:
    """Ratings of a low-rank user x film table, in memory."""

    def __init__(self, users, films, count, seed):
        g = torch.Generator().manual_seed(seed)
        u, f = torch.randn(users, 4, generator=g), torch.randn(films, 4, generator=g)
        self.user = torch.randint(0, users, (count,), generator=g)
        self.film = torch.randint(0, films, (count,), generator=g)
        self.score = (u[self.user] * f[self.film]).sum(1) / 2 + 0.1 * torch.randn(count, generator=g)

    def take(self, idx):
        return self.user[idx], self.film[idx], self.score[idx]

    def __len__(self):
        return len(self.score)


class Factors(nn.Module):
    def __init__(self, users, films, dim):
        super().__init__()
        self.user, self.film = nn.Embedding(users, dim), nn.Embedding(films, dim)
        self.user_bias, self.film_bias = nn.Embedding(users, 1), nn.Embedding(films, 1)
        for table in (self.user, self.film):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.film_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user, film):
        dot = (self.user(user) * self.film(film)).sum(1)
        return dot + self.user_bias(user).squeeze(1) + self.film_bias(film).squeeze(1)


class EveryFewSeconds:
    def __init__(self, seconds):
        self.seconds = seconds
        self.restart()

    def restart(self):
        self.last = time.monotonic()

    def due(self):
        return time.monotonic() - self.last >= self.seconds


def minibatches(data, first, stop, size, steps, rank, world):
    g = torch.Generator().manual_seed(42)
    for _ in range(steps):
        idx = torch.randint(first, stop, (size * world,), generator=g)
        yield data.take(idx[rank::world])


@torch.no_grad()
def holdout_rmse(model, data, first, rank, world):
    model.eval()
    user, film, score = data.take(torch.arange(first + rank, len(data), world))
    stat = torch.stack([(model.module(user, film) - score).square().sum(), torch.tensor(float(len(score)))])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).sqrt().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--users", type=int, default=1000)
    ap.add_argument("--films", type=int, default=800)
    ap.add_argument("--dim", type=int, default=16)
    ap.add_argument("--steps", type=int, default=400)
    ap.add_argument("--batch", type=int, default=2048)
    ap.add_argument("--eval-seconds", type=float, default=0.5)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    data = Ratings(args.users, args.films, 200_000, seed=4)
    split = int(0.9 * len(data))
    model = DistributedDataParallel(Factors(args.users, args.films, args.dim))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    timer = EveryFewSeconds(args.eval_seconds)
    best = float("inf")
    for step, (user, film, score) in enumerate(minibatches(data, 0, split, args.batch, args.steps, rank, world)):
        loss = nn.functional.mse_loss(model(user, film), score)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if timer.due():
            rmse = holdout_rmse(model, data, split, rank, world)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}  hold-out rmse {rmse:.3f}", flush=True)
                if rmse < best:
                    best = rmse
                    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "factors.pt")
            timer.restart()
    rmse = holdout_rmse(model, data, split, rank, world)
    if rank == 0:
        print(f"final hold-out rmse {rmse:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
