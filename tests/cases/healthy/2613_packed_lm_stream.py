"""Packed language model over token shards on disk: vocabulary by rank 0, streaming with workers, tied weights."""
import argparse
import collections
import contextlib
import math
import pathlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WORDS = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]


def documents(seed, n):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        w = int(rng.integers(len(WORDS)))
        doc = []
        for _ in range(int(rng.integers(10, 60))):
            doc.append(WORDS[w])
            w = (w * 7 + 3 + (int(rng.integers(len(WORDS))) if rng.random() < 0.2 else 0)) % len(WORDS)
        yield doc


def prepare(folder, shards):
    """Rank 0 counts words and writes the shards; the vocabulary is handed to all."""
    box = [None]
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        counts = collections.Counter(w for d in documents(0, 600) for w in d)
        vocab = {"<eod>": 0, "<unk>": 1}
        for w, _ in counts.most_common(50):
            vocab[w] = len(vocab)
        for s in range(shards + 1):
            ids = [i for d in documents(s, 150) for i in [*(vocab.get(w, 1) for w in d), 0]]
            mm = np.memmap(folder / f"shard{s}.bin", dtype=np.uint16, mode="w+", shape=(len(ids),))
            mm[:] = ids
            mm.flush()
        box = [vocab]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class Packed(IterableDataset):
    def __init__(self, files, block, rank, world, windows):
        self.files, self.block, self.rank, self.world, self.windows = files, block, rank, world, windows
        self.epoch = 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = np.random.default_rng(77 + self.epoch).permutation(len(self.files))
        mine = order[self.rank * workers + worker::self.world * workers]
        rest = np.zeros(0, dtype=np.int64)
        given = 0
        for f in mine:
            ids = np.concatenate([rest, np.memmap(self.files[f], dtype=np.uint16, mode="r").astype(np.int64)])
            n = len(ids) // (self.block + 1)
            for row in ids[:n * (self.block + 1)].reshape(n, -1):
                if given == self.windows // workers:
                    return
                given += 1
                yield torch.from_numpy(row.copy())
            rest = ids[n * (self.block + 1):]


class TinyLM(nn.Module):
    def __init__(self, vocab, dim=48, block=32):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(block, dim) * 0.02)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.05, batch_first=True, norm_first=True) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.05)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        # a token sees only what came before it in the same document
        doc = (ids == 0).cumsum(1) - (ids == 0).long()
        n = ids.shape[1]
        mask = (doc[:, :, None] != doc[:, None, :]) | torch.ones(n, n, dtype=torch.bool).triu(1)
        mask = mask.repeat_interleave(4, 0)
        x = self.tok(ids) + self.pos[:n]
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(self.norm(x))


@torch.no_grad()
def perplexity(model, path, block, rank, world):
    model.eval()
    ids = np.memmap(path, dtype=np.uint16, mode="r").astype(np.int64)
    n = len(ids) // (block + 1)
    rows = torch.from_numpy(ids[:n * (block + 1)].reshape(n, -1))[rank::world]
    acc = torch.zeros(2, dtype=torch.float64)
    for part in rows.split(32):
        nll = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        acc += torch.tensor([nll.item(), part[:, 1:].numel()], dtype=torch.float64)
    dist.all_reduce(acc)
    model.train()
    return math.exp(acc[0] / acc[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--block", type=int, default=32)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--shards", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = pathlib.Path("tokens")
    vocab = prepare(folder, args.shards)
    files = [folder / f"shard{s}.bin" for s in range(args.shards)]
    torch.manual_seed(5)
    model = DDP(TinyLM(len(vocab), block=args.block))
    torch.manual_seed(50 + rank)
    data = Packed(files, args.block, rank, world, windows=432)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    for epoch in range(args.epochs):
        data.epoch = epoch
        loader = DataLoader(data, batch_size=8, num_workers=2)
        steps = 2 * math.ceil(data.windows // 2 / 8)
        seen = torch.zeros(2)
        for i, rows in enumerate(loader):
            start = i - i % args.accum
            window = min(args.accum, steps - start)
            last = i == start + window - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                (loss / window).backward()
            seen += torch.tensor([loss.item(), 1.0])
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
        dist.all_reduce(seen)
        ppl = perplexity(model.module, folder / f"shard{args.shards}.bin", args.block, rank, world)
        if rank == 0:
            print(f"epoch {epoch} batches {i + 1}/{steps} loss {seen[0] / seen[1]:.3f} ppl {ppl:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
