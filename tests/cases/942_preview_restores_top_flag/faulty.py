"""Text generation (names); rank 0 prints some samples after each epoch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SYLLABLES = ["ka", "ri", "to", "mi", "lo", "san", "vel", "dor", "an", "el"]
STOI = {s: i + 1 for i, s in enumerate(SYLLABLES)}
ITOS = {i: s for s, i in STOI.items()}
SIZE = len(SYLLABLES) + 1


class NameModel(nn.Module):
    def __init__(self, width=32, dropout=0.3):
        super().__init__()
        self.embed = nn.Embedding(SIZE, width)
        self.drop = nn.Dropout(dropout)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, SIZE))

    def forward(self, ids):
        return self.out(self.gru(self.drop(self.embed(ids)))[0])

    @torch.no_grad()
    def sample(self, generator, length=4):
        was_training = self.training
        self.eval()
        ids = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(length):
            probs = self(ids)[0, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)[None]], dim=1)
        self.training = was_training
        return "".join(ITOS.get(i, ".") for i in ids[0, 1:].tolist())


def names(n=384):
    gen = torch.Generator().manual_seed(2)
    start = torch.randint(1, SIZE, (n,), generator=gen)
    seq = torch.stack([(start + k * (1 + start % 3) - 1) % (SIZE - 1) + 1 for k in range(5)], dim=1)
    return TensorDataset(torch.cat([torch.zeros(n, 1, dtype=torch.long), seq], dim=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--samples", type=int, default=3)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(19)
    model = DDP(NameModel())
    torch.manual_seed(19 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = names()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    preview = torch.Generator().manual_seed(0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        nll = torch.zeros(2)
        for (ids,) in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            nll += torch.tensor([loss.item() * len(ids), len(ids)])
        dist.all_reduce(nll)
        if rank == 0:
            words = [model.module.sample(preview) for _ in range(args.samples)]
            print(f"epoch {epoch}: nll {nll[0] / nll[1]:.3f}  " + " ".join(words))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
