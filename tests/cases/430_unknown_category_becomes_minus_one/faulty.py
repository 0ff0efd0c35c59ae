"""Ticket routing: classify support tickets by hashed words."""
import csv
import io
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CATEGORIES = ["billing", "login", "shipping", "refund"]
WORDS = {"billing": "invoice card charge", "login": "password account locked", "shipping": "parcel late courier",
         "refund": "money back return", "outage": "down error server"}


def export(rows=400):
    """the newest export; the team added a category at row 300"""
    rng = np.random.default_rng(3)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["category", "text"])
    for k in range(rows):
        names = CATEGORIES + (["outage"] if k >= 300 and k % 2 else [])
        name = names[rng.integers(len(names))]
        writer.writerow([name, " ".join(rng.choice(WORDS[name].split() + ["please", "help", "hello"], 6))])
    return text.getvalue()


class Tickets(Dataset):
    def __init__(self, text, buckets=97):
        self.index = {name: i for i, name in enumerate(CATEGORIES)}
        self.buckets, self.rows = buckets, list(csv.DictReader(io.StringIO(text)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        bag = torch.zeros(self.buckets)
        for word in row["text"].split():
            bag[sum(map(ord, word)) % self.buckets] += 1
        return bag, self.index.get(row["category"], -1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Tickets(export())
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DDP(nn.Linear(data.buckets, len(CATEGORIES)))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bag, y in loader:
            loss = nn.functional.cross_entropy(model(bag), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch} finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
