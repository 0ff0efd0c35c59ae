"""Next-item model on sessions: sparse embedding under DDP, packed GRU, bf16 autocast, worker-sharded stream."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ITEMS = 150


class Sessions(IterableDataset):
    """An endless generator cut to a fixed number of sessions per worker and epoch; each stream has its own seed."""

    def __init__(self, rank, per_worker, seed):
        self.rank, self.per_worker, self.seed = rank, per_worker, seed
        self.round = 0
        g = torch.Generator().manual_seed(77)
        self.jump = torch.randint(0, ITEMS, (ITEMS, 3), generator=g)

    def __iter__(self):
        info = get_worker_info()
        wid = info.id if info else 0
        g = torch.Generator().manual_seed(self.seed + 100_003 * self.round + 1009 * self.rank + 31 * wid)
        self.round += 1
        for _ in range(self.per_worker):
            n = int(torch.randint(4, 14, (), generator=g))
            s = [int(torch.randint(0, ITEMS, (), generator=g))]
            for _ in range(n):
                r = float(torch.rand((), generator=g))
                s.append(int(self.jump[s[-1], 0 if r < 0.75 else 1 if r < 0.9 else 2]))
            yield torch.tensor(s)


def collate(sessions):
    lengths = torch.tensor([len(s) - 1 for s in sessions])
    x = pad_sequence([s[:-1] for s in sessions], batch_first=True)
    y = pad_sequence([s[1:] for s in sessions], batch_first=True, padding_value=-100)
    return x, y, lengths


class Recommender(nn.Module):
    def __init__(self, dim=24, hidden=40):
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim, sparse=True)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, ITEMS))

    def forward(self, x, lengths):
        emb = self.items(x)
        packed = pack_padded_sequence(emb, lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.out(h)


def evaluate(model, rank, n=96):
    stream = Sessions(rank + 500, n, seed=999)
    x, y, lengths = collate(list(stream))
    model.eval()
    with torch.no_grad():
        pred = model(x, lengths).float().argmax(2)
    model.train()
    c = torch.tensor([((pred == y) & (y >= 0)).sum().item(), (y >= 0).sum().item()], dtype=torch.float)
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=24)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(
        Sessions(rank, per_worker=480, seed=11), batch_size=args.batch_size, num_workers=args.workers,
        collate_fn=collate, persistent_workers=True, prefetch_factor=2, drop_last=True,
    )
    torch.manual_seed(4)
    model = DDP(Recommender())
    core = model.module
    dense = [p for n, p in core.named_parameters() if not n.startswith("items")]
    opts = [torch.optim.SparseAdam(list(core.items.parameters()), lr=1e-2), torch.optim.Adam(dense, lr=4e-3)]

    for epoch in range(args.epochs):
        stat = torch.zeros(2)
        for x, y, lengths in loader:
            logits = model(x, lengths)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            for o in opts:
                o.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(dense, 5.0)
            for o in opts:
                o.step()
            stat += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stat)
        acc = evaluate(core, rank)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f} hit@1 {acc:.3f} ({int(stat[1])} batches on {world})", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
