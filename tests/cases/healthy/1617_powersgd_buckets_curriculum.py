"""Bucketed variable-length sequences, a length curriculum, and the PowerSGD communication hook.

A batch sampler groups samples of like length; the global list of batches is shuffled by the epoch,
cut to a multiple of the world size and dealt out. Short sequences come first (curriculum).
"""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Majority(Dataset):
    """Tokens 1..6; label: which of the tokens 1 and 2 is more frequent (0: 1 wins, 1: 2 wins)."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = []
        while len(self.rows) < n:
            length = rng.randint(5, 28)
            seq = [rng.choice([1, 2, 3, 4, 5, 6]) for _ in range(length)]
            a, b = seq.count(1), seq.count(2)
            if a != b:
                self.rows.append((torch.tensor(seq), int(b > a)))
        self.lengths = [len(s) for s, _ in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class BucketBatches(Sampler):
    def __init__(self, lengths, batch, rank, world, seed=0):
        self.lengths, self.batch, self.rank, self.world, self.seed = lengths, batch, rank, world, seed
        self.epoch, self.limit = 0, None

    def set_epoch(self, epoch, limit):
        self.epoch, self.limit = epoch, limit

    def _plan(self):
        rng = random.Random(1000 * self.seed + self.epoch)
        ids = [i for i, n in enumerate(self.lengths) if n <= self.limit]
        rng.shuffle(ids)
        ids.sort(key=lambda i: self.lengths[i] // 4)  # stable: random inside a bucket
        batches = [ids[k:k + self.batch] for k in range(0, len(ids) - self.batch + 1, self.batch)]
        rng.shuffle(batches)
        batches = batches[: len(batches) // self.world * self.world]
        return batches[self.rank::self.world]

    def __iter__(self):
        return iter(self._plan())

    def __len__(self):
        return len(self._plan())


def collate(rows):
    seqs, ys = zip(*rows)
    return pad_sequence(seqs, batch_first=True), torch.tensor([len(s) for s in seqs]), torch.tensor(ys)


class GRUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 16, padding_idx=0)
        self.gru = nn.GRU(16, 48, batch_first=True)
        self.out = nn.Linear(48, 2)

    def forward(self, x, n):
        packed = pack_padded_sequence(self.emb(x), n, batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        return self.out(h[-1])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = Majority(1600, 1), Majority(300, 2)
    torch.manual_seed(0)
    ddp = DDP(GRUNet())
    state = powersgd.PowerSGDState(process_group=None, matrix_approximation_rank=4,
                                   start_powerSGD_iter=12, min_compression_rate=1.5)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    opt = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    sampler = BucketBatches(train.lengths, 16, rank, world)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)

    for epoch, limit in enumerate([12, 20, 28, 28, 28]):
        sampler.set_epoch(epoch, limit)
        ddp.train()
        tot = torch.zeros(2)
        for x, n, y in loader:
            loss = F.cross_entropy(ddp(x, n), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            opt.step()
            tot += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(tot)
        ddp.eval()
        ok = torch.zeros(2)
        with torch.no_grad():
            mine = [valid[i] for i in range(rank, len(valid), world)]
            for k in range(0, len(mine), 32):
                x, n, y = collate(mine[k:k + 32])
                ok += torch.tensor([(ddp.module(x, n).argmax(1) == y).sum().item(), float(len(y))])
        dist.all_reduce(ok)
        if rank == 0:
            print(f"epoch {epoch} max len {limit} batches {len(loader)} "
                  f"loss {tot[0] / tot[1]:.3f} acc {ok[0] / ok[1]:.3f}", flush=True)
    assert (ok[0] / ok[1]).item() > 0.7
    if rank == 0:
        torch.save(ddp.module.state_dict(), "majority_gru.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
