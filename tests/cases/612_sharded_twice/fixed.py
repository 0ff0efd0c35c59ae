"""Review sentiment (bag of words) from sharded records."""
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SETTINGS = json.loads('{"epochs": 4, "batch_size": 16, "lr": 0.02, "vocab": 60, "records": 400}')


def make_records(n, vocab):
    """Stands in for the JSON lines of the corpus."""
    g = torch.Generator().manual_seed(42)
    polarity = torch.randn(vocab, generator=g)
    records = []
    for i in range(n):
        words = torch.randint(0, vocab, (12,), generator=g)
        records.append({"id": i, "words": words.tolist(), "label": int(polarity[words].sum() > 0)})
    return records


class Reviews(Dataset):
    def __init__(self, records, rank, world):
        records = records[: len(records) // world * world]
        self.records = records[rank::world]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        r = self.records[i]
        return torch.tensor(r["words"]), r["label"]


class Bow(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, 24)
        self.fc = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))

    def forward(self, words):
        return self.fc(self.emb(words))


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    data = Reviews(make_records(cfg["records"], cfg["vocab"]), rank, world)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=cfg["batch_size"], sampler=sampler)
    model = DistributedDataParallel(Bow(cfg["vocab"]))
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        good = torch.zeros(2)
        for words, label in loader:
            out = model(words)
            loss = F.cross_entropy(out, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            good += torch.tensor([(out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(good)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {good[0] / good[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SETTINGS)
