"""Endless token stream with a base class that knows about shards."""
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def env_int(*names, default):
    for name in names:
        if os.environ.get(name):
            return int(os.environ[name])
    return default


class ShardedStream(IterableDataset):
    """Subclasses yield everything from documents(); this class keeps what belongs here."""

    def __init__(self):
        self.shard = env_int("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", default=0)
        self.shards = env_int("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", default=1)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def documents(self):
        raise NotImplementedError

    def __iter__(self):
        info = get_worker_info()
        shard, shards = self.shard, self.shards
        if info is not None:
            shard, shards = shard * info.num_workers + info.id, shards * info.num_workers
        yield from itertools.islice(self.documents(), shard, None, shards)


class Walks(ShardedStream):
    def __init__(self, n=480, length=14):
        super().__init__()
        self.n, self.length = n, length

    def documents(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))
        for i in order.tolist():
            g = torch.Generator().manual_seed(50_000 + i)
            yield torch.randint(1, 3, (self.length,), generator=g).cumsum(0) % 10


class NextToken(nn.Module):
    def __init__(self, vocab=10, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, 40, batch_first=True)
        self.out = nn.Linear(40, vocab)

    def forward(self, tokens):
        logits = self.out(self.rnn(self.emb(tokens[:, :-1]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(NextToken())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    stream = Walks()
    loader = DataLoader(stream, batch_size=20, drop_last=True)
    for epoch in range(4):
        stream.set_epoch(epoch)
        total = torch.zeros(2)
        for tokens in loader:
            loss = model(tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
