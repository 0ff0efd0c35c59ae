"""One pass over a text file: which of four authors wrote the line?"""
import itertools
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

LETTERS = "abcdefghijklmnop"


def write_corpus(path, lines=2560):
    rng = random.Random(5)
    with open(path, "w") as f:
        for _ in range(lines):
            author = rng.randrange(4)
            own = LETTERS[4 * author : 4 * author + 4]
            text = "".join(rng.choice(own if rng.random() < 0.45 else LETTERS) for _ in range(20))
            f.write(f"{author}\t{text}\n")


class Lines(IterableDataset):
    def __init__(self, path, rank, world):
        self.path, self.rank, self.world = path, rank, world

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first, stride = self.rank * workers + worker, self.world * workers
        with open(self.path) as f:
            for line in itertools.islice(f, first, None, stride):
                author, text = line.rstrip("\n").split("\t")
                yield torch.tensor([LETTERS.index(c) for c in text]), int(author)


class AuthorNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(len(LETTERS), 12)
        self.gru = nn.GRU(12, 24, batch_first=True)
        self.out = nn.Linear(24, 4)

    def forward(self, x):
        h, _ = self.gru(self.emb(x))
        return self.out(h.mean(1))


def progress(loader, model, opt):
    """Trains and yields (loss sum, right answers, lines) after each batch."""
    for text, author in loader:
        out = model(text)
        loss = nn.functional.cross_entropy(out, author)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        yield torch.tensor([loss.item() * len(author), (out.argmax(1) == author).sum().item(), len(author)])


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        write_corpus("authors.txt")
    dist.barrier()

    torch.manual_seed(0)
    model = DDP(AuthorNet())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(Lines("authors.txt", rank, world), batch_size=32, num_workers=2)
    total = torch.zeros(3)
    for step, stats in enumerate(progress(loader, model, opt), start=1):
        total += stats
        if step % 8 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {(total[0] / total[2]).item():.3f}, accuracy {(total[1] / total[2]).item():.3f}")
            total = torch.zeros(3)
    if rank == 0:
        torch.save(model.module.state_dict(), "authors.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
