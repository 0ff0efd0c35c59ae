"""Character model on text shards that are streamed by the loader workers."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB = 28


class ShardStream(IterableDataset):
    def __init__(self, shards, per_shard, seq_len, rank, world):
        self.shards, self.per_shard, self.seq_len = shards, per_shard, seq_len
        self.rank, self.world = rank, world
        self.epoch = 0

    def read(self, shard):
        g = torch.Generator().manual_seed(9000 + shard)
        for _ in range(self.per_shard):
            start = torch.randint(0, VOCAB, (1,), generator=g)
            stride = 1 + torch.randint(0, 3, (1,), generator=g)
            yield (start + stride * torch.arange(self.seq_len + 1)) % VOCAB

    def __iter__(self):
        info = get_worker_info()
        me = self.rank + info.id
        readers = self.world * info.num_workers
        order = torch.randperm(self.shards, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for shard in order[me::readers]:
            yield from self.read(shard)


class CharModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.LSTM(dim, 48, batch_first=True)
        self.out = nn.Linear(48, VOCAB)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--shards", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--lr", type=float, default=6e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = DistributedDataParallel(CharModel())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    stream = ShardStream(args.shards, 24, 20, rank, world)
    loader = DataLoader(stream, batch_size=16, num_workers=args.workers)

    for epoch in range(args.epochs):
        stream.epoch = epoch
        sums = torch.zeros(2)
        for seq in loader:
            logits = model(seq[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), seq[:, 1:].reshape(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sums += torch.tensor([loss.item() * len(seq), len(seq)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {int(sums[1])} sequences, loss {(sums[0] / sums[1]).item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "char_model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
