"""Skip-gram embeddings with negative sampling, started from one command on all cores given."""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.inner, self.outer = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        nn.init.uniform_(self.inner.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.outer.weight)

    def forward(self, centre, context, negative):
        c = self.inner(centre)
        pos = (c * self.outer(context)).sum(1)
        neg = torch.einsum("bd,bkd->bk", c, self.outer(negative))
        return -(F.logsigmoid(pos) + F.logsigmoid(-neg).sum(1)).mean()


def pairs(vocab, count, batch, seed):
    """Words of one topic (tens digit) appear together."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        topic = torch.randint(0, vocab // 10, (batch,), generator=g)
        centre = 10 * topic + torch.randint(0, 10, (batch,), generator=g)
        context = 10 * topic + torch.randint(0, 10, (batch,), generator=g)
        yield centre, context, torch.randint(0, vocab, (batch, 4), generator=g)


def setup(rank, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())
    dist.init_process_group("gloo", rank=rank, world_size=args.workers)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)


def worker(rank, args):
    setup(rank, args)
    model = DDP(SkipGram(args.vocab, args.dim))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    total = torch.zeros(())
    for step, batch in enumerate(pairs(args.vocab, args.steps, args.batch, args.seed + 1 + rank), start=1):
        loss = model(*batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.detach()
        if step % 50 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {total.item() / (50 * args.workers):.4f}", flush=True)
            total.zero_()
    if rank == 0:
        v = F.normalize(model.module.inner.weight.detach(), dim=1)
        near = (v @ v.T).fill_diagonal_(-1).argmax(1)
        same = (near // 10 == torch.arange(args.vocab) // 10).float().mean().item()
        print(f"nearest neighbour of the same topic: {100 * same:.0f}%", flush=True)
        torch.save(v, "embeddings.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--vocab", type=int, default=200)
    ap.add_argument("--dim", type=int, default=24)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    mp.spawn(worker, args=(args,), nprocs=args.workers, join=True)


if __name__ == "__main__":
    main()
