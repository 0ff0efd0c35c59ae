"""Language model on protein-like sequences, batched by token budget."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Proteins(Dataset):
    def __init__(self, n=260):
        rng = np.random.default_rng(77)
        lengths = np.sort(rng.gamma(2.0, 9.0, n).astype(int) + 4)
        self.items = [torch.from_numpy(rng.integers(1, 21, k)) for k in lengths]
        self.lengths = lengths.tolist()

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class TokenBudgetSampler(Sampler):
    """lists of indices; sum of lengths <= budget"""

    def __init__(self, lengths, budget, rank, world):
        self.lengths, self.budget, self.rank, self.world = lengths, budget, rank, world
        self.epoch = 0

    def _pack(self, order):
        batch, used = [], 0
        for i in order:
            if batch and used + self.lengths[i] > self.budget:
                yield batch
                batch, used = [], 0
            batch.append(i)
            used += self.lengths[i]
        if batch:
            yield batch

    def __iter__(self):
        half = np.array_split(np.arange(len(self.lengths)), self.world)[self.rank]
        order = np.random.default_rng([self.epoch, self.rank]).permutation(half).tolist()
        yield from self._pack(order)


def collate(items):
    return pad_sequence(items, batch_first=True)


class LM(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(21, dim), nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, 21)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main(epochs=2, budget=160):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    data = Proteins()
    sampler = TokenBudgetSampler(data.lengths, budget, rank, world)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = DDP(LM())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.epoch = epoch
        seen = torch.zeros(1)
        for x in loader:
            logits = model(x[:, :-1])
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), x[:, 1:], ignore_index=0)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += (x > 0).sum()
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {int(seen)} tokens", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
