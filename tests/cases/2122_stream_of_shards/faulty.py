"""Character language model on a stream of text shards."""
import os
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


@dataclass
class Config:
    data_dir: str = "shards"
    shards: int = 12
    lines_per_shard: int = 32
    width: int = 48
    batch: int = 16
    workers: int = 2
    epochs: int = 3
    lr: float = 5e-3
    seed: int = 20


ALPHABET = "abcdefghijklmnopqrstuvwxyz ."
VOCAB = {c: i for i, c in enumerate(ALPHABET)}


def prepare(cfg):
    os.makedirs(cfg.data_dir, exist_ok=True)
    rng = random.Random(cfg.seed)
    words = ["".join(rng.choice(ALPHABET[:26]) for _ in range(rng.randint(2, 6))) for _ in range(40)]
    for s in range(cfg.shards):
        with open(os.path.join(cfg.data_dir, f"part-{s:03d}.txt"), "w") as out:
            for _ in range(cfg.lines_per_shard):
                line = ""
                while len(line) < cfg.width + 1:
                    line += rng.choice(words) + rng.choice([" ", " ", ". "])
                out.write(line[: cfg.width + 1] + "\n")


class TextStream(IterableDataset):
    def __init__(self, cfg, rank, world_size):
        self.cfg, self.rank, self.world_size = cfg, rank, world_size
        self.epoch = 0

    def my_files(self):
        files = sorted(os.listdir(self.cfg.data_dir))
        random.Random(self.cfg.seed + self.epoch).shuffle(files)
        info = get_worker_info()
        if info is None:
            return files[self.rank :: self.world_size]
        reader = self.rank + info.id
        return files[reader :: self.world_size * info.num_workers]

    def __iter__(self):
        for name in self.my_files():
            with open(os.path.join(self.cfg.data_dir, name)) as f:
                for line in f:
                    ids = torch.tensor([VOCAB[c] for c in line.rstrip("\n")])
                    yield ids[:-1], ids[1:]


class CharRNN(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.emb = nn.Embedding(len(ALPHABET), 32)
        self.rnn = nn.GRU(32, hidden, batch_first=True)
        self.head = nn.Linear(hidden, len(ALPHABET))

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.head(h)


def train_steps(model, stream, loader, cfg):
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        stream.epoch = epoch
        for x, y in loader:
            logits = model(x)
            loss = cross_entropy(logits.flatten(0, 1), y.flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            yield epoch, loss.detach()


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    if rank == 0:
        prepare(cfg)
    dist.barrier()

    stream = TextStream(cfg, rank, world)
    loader = DataLoader(stream, batch_size=cfg.batch, num_workers=cfg.workers)
    model = DistributedDataParallel(CharRNN())

    for step, (epoch, loss) in enumerate(train_steps(model, stream, loader, cfg), 1):
        if step % 6 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"[{epoch}/{step}] nll {loss.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
