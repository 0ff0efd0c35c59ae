"""Product embeddings from baskets, large tables, many micro batches per step."""
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

PRODUCTS, DIM, BASKET = 8000, 96, 5


class BasketModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Embedding(PRODUCTS, DIM)
        self.mix = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.score = nn.Linear(DIM, PRODUCTS)

    def forward(self, basket):
        return self.score(self.mix(self.product(basket).mean(1)))


class Baskets:
    """Customers of one of fifty tastes; draws for one rank."""

    def __init__(self, rank, size):
        self.gen, self.size = torch.Generator().manual_seed(20 + rank), size

    def draw(self):
        taste = torch.randint(0, 50, (self.size, 1), generator=self.gen)
        goods = torch.randint(0, 4, (self.size, BASKET + 1), generator=self.gen)
        basket = taste * 40 + goods
        return basket[:, :-1], basket[:, -1]


class Accumulator:
    """Runs `accum` micro batches and one optimizer step."""

    def __init__(self, model, opt, accum):
        self.model, self.opt, self.accum = model, opt, accum

    def maybe_no_sync(self, micro):
        return self.model.no_sync() if micro < self.accum - 1 else contextlib.nullcontext()

    def step(self, source):
        total = torch.zeros(())
        for micro in range(self.accum):
            basket, target = source.draw()
            loss = nn.functional.cross_entropy(self.model(basket), target) / self.accum
            with self.maybe_no_sync(micro):
                loss.backward()
            total += loss.detach()
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)
        return total


def main(steps=16, accum=12, micro_batch=4):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DDP(BasketModel())
    runner = Accumulator(model, torch.optim.Adagrad(model.parameters(), lr=0.05), accum)
    source = Baskets(rank, micro_batch)
    t0, window = time.perf_counter(), torch.zeros(())
    for k in range(1, steps + 1):
        window += runner.step(source)
        if k % 4 == 0:
            dist.all_reduce(window)
            if rank == 0:
                took = (time.perf_counter() - t0) / 4
                print(f"step {k}: loss {window.item() / 4 / world:.3f}, {1000 * took:.0f} ms a step", flush=True)
            t0, window = time.perf_counter(), torch.zeros(())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
