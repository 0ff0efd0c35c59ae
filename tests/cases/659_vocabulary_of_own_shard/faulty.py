"""Headline topics: vocabulary, bag of embeddings, DDP."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

TOPICS = {"sport": "goal team match win cup race".split(), "money": "bank stock rate fund debt price".split(), "weather": "rain wind sun cloud storm heat".split()}
FILLERS = "the a of in on as at by for to with".split()
MAX_WORDS = 29


def headlines(n=360):
    g = torch.Generator().manual_seed(35)
    pick = lambda words: words[int(torch.randint(0, len(words), (1,), generator=g))]
    names = list(TOPICS)
    rows = []
    for _ in range(n):
        topic = int(torch.randint(0, 3, (1,), generator=g))
        rows.append(([pick(FILLERS), pick(TOPICS[names[topic]]), pick(FILLERS), pick(TOPICS[names[topic]]), pick(FILLERS)], topic))
    return rows


class Vocabulary:
    def __init__(self, rows):
        self.index = {}
        for words, _ in rows:
            for w in words:
                if len(self.index) < MAX_WORDS:
                    self.index.setdefault(w, len(self.index))

    def __call__(self, words):
        return torch.tensor([self.index.get(w, MAX_WORDS) for w in words])


class Headlines(Dataset):
    def __init__(self, rows, vocabulary):
        self.rows, self.vocabulary = rows, vocabulary

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, topic = self.rows[i]
        return self.vocabulary(words), topic


class Topics(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed = nn.EmbeddingBag(MAX_WORDS + 1, d)
        self.out = nn.Linear(d, 3)

    def forward(self, ids):
        return self.out(self.embed(ids))


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    rows = headlines()
    mine = rows[rank::world]
    vocabulary = Vocabulary(mine)
    loader = DataLoader(Headlines(mine, vocabulary), 20, shuffle=True, generator=torch.Generator().manual_seed(rank), drop_last=True)
    model = DDP(Topics())
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(4):
        c = torch.zeros(2)
        for ids, topic in loader:
            out = model(ids)
            loss = nn.functional.cross_entropy(out, topic)
            opt.zero_grad()
            loss.backward()
            opt.step()
            c += torch.tensor([(out.argmax(1) == topic).sum().item(), len(topic)])
        dist.all_reduce(c)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {c[0] / c[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
