"""Pre-training of a tiny language model with checkpoints every few iterations and automatic resume."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, BLOCK = 48, 16


class TinyLM(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(BLOCK, dim))
        self.block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, VOCAB)
        self.register_buffer("mask", torch.triu(torch.full((BLOCK, BLOCK), float("-inf")), 1), persistent=False)

    def forward(self, ids):
        return self.head(self.block(self.tok(ids) + self.pos, src_mask=self.mask))


def corpus(n=20000):
    """A noisy second-order chain."""
    g = torch.Generator().manual_seed(3)
    jump = torch.randint(0, VOCAB, (VOCAB,), generator=g)
    noise = torch.rand(n, generator=g)
    rand = torch.randint(0, VOCAB, (n,), generator=g)
    ids = [1, 2]
    for i in range(n - 2):
        ids.append(int(rand[i]) if noise[i] < 0.1 else (int(jump[ids[-1]]) + ids[-2]) % VOCAB)
    return torch.tensor(ids)


def get_batch(data, iter_num, rank, size):
    """Batches are a function of the iteration and the rank, so a resumed run sees new data."""
    g = torch.Generator().manual_seed(1_000_003 * (iter_num + 1) + rank)
    at = torch.randint(0, len(data) - BLOCK - 1, (size,), generator=g)
    x = torch.stack([data[i:i + BLOCK] for i in at])
    y = torch.stack([data[i + 1:i + 1 + BLOCK] for i in at])
    return x, y


def iter_of(path):
    return int(path.name.split("-")[1])


def latest(out_dir):
    paths = list(out_dir.glob("iter-*-ckpt.pth"))
    return sorted(paths)[-1] if paths else None


def fit(args, data, rank, until):
    torch.manual_seed(1)
    net = TinyLM()
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    iter_num = 0
    resume = latest(args.out_dir)
    if resume is not None:
        state = torch.load(resume, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        iter_num = state["iter_num"]
        if rank == 0:
            print(f"Resuming training from {resume.name}", flush=True)
    while iter_num < until:
        x, y = get_batch(data, iter_num, rank, args.batch_size)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        iter_num += 1
        if iter_num % args.save_interval == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"iter {iter_num}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num},
                           args.out_dir / f"iter-{iter_num}-ckpt.pth")
            dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-interval", type=int, default=40)
    ap.add_argument("--jobs", type=int, nargs="+", default=[120, 200], help="iterations at which a job's time is up")
    ap.add_argument("--out-dir", type=Path, default=Path("out/tiny"))
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    args.out_dir.mkdir(parents=True, exist_ok=True)
    data = corpus()
    for until in args.jobs:
        fit(args, data, rank, until)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
