"""Matrix-factorisation recommender with a pairwise ranking loss; starts its own worker processes."""
import multiprocessing
import os
import socket
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CONFIG = dict(users=300, items=200, dim=16, per_user=12, batch=256, epochs=6, lr=0.02, seed=4, workers=2)


def free_port():
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as s:
        s.bind(("127.0.0.1", 0))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return s.getsockname()[1]


def interactions(cfg):
    g = torch.Generator().manual_seed(cfg["seed"])
    users = torch.randn(cfg["users"], 6, generator=g)
    items = torch.randn(cfg["items"], 6, generator=g)
    scores = users @ items.T + torch.randn(cfg["users"], cfg["items"], generator=g)
    liked = scores.topk(cfg["per_user"] + 1, dim=1).indices
    held_out = liked[:, cfg["per_user"] // 2].clone()
    keep = torch.ones(liked.shape[1], dtype=torch.bool)
    keep[cfg["per_user"] // 2] = False
    liked = liked[:, keep]
    pairs = torch.stack([torch.arange(cfg["users"]).repeat_interleave(liked.shape[1]), liked.flatten()], 1)
    return pairs, held_out


class Factorisation(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.user = nn.Embedding(cfg["users"], cfg["dim"])
        self.item = nn.Embedding(cfg["items"], cfg["dim"])
        self.bias = nn.Embedding(cfg["items"], 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def score(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)

    def forward(self, u, pos, neg):
        return self.score(u, pos) - self.score(u, neg)


def setup(rank, world, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=15))


def shard(pairs, epoch, rank, world, batch, seed):
    g = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(len(pairs), generator=g)
    order = order[: len(order) // (world * batch) * world * batch]
    return pairs[order[rank::world]].split(batch)


@torch.no_grad()
def hit_rate(model, pairs, held_out, k=20):
    scores = model.user.weight @ model.item.weight.T + model.bias.weight.T
    scores[pairs[:, 0], pairs[:, 1]] = -torch.inf
    return (scores.topk(k, 1).indices == held_out[:, None]).any(1).float().mean().item()


def worker(rank, world, port, cfg):
    torch.set_num_threads(1)
    setup(rank, world, port)
    torch.manual_seed(cfg["seed"])
    pairs, held_out = interactions(cfg)
    model = DDP(Factorisation(cfg))
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    negatives = torch.Generator().manual_seed(100 + rank)

    for epoch in range(cfg["epochs"]):
        total, batches = torch.zeros(1), shard(pairs, epoch, rank, world, cfg["batch"], cfg["seed"])
        for batch in batches:
            neg = torch.randint(0, cfg["items"], (len(batch),), generator=negatives)
            loss = -F.logsigmoid(model(batch[:, 0], batch[:, 1], neg)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            hit = hit_rate(model.module, pairs, held_out)
            print(f"epoch {epoch} loss {total.item() / world / len(batches):.4f} hit@20 {hit:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "factors.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    ctx = multiprocessing.get_context("spawn")
    world = CONFIG["workers"]
    port = free_port()
    procs = [ctx.Process(target=worker, args=(r, world, port, CONFIG)) for r in range(world)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    codes = [p.exitcode for p in procs]
    if any(codes):
        raise SystemExit(f"workers ended with {codes}")


if __name__ == "__main__":
    main()
