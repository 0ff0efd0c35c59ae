"""Byte-level convolutional classifier. Memory is short, so an update is made of four small batches."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MICRO_BATCH, ACCUM_GRAD = 5, 4


class Snippets(Dataset):
    """'languages' that differ in how often some bytes occur"""

    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.lang = torch.randint(3, (n,), generator=g)
        probs = torch.softmax(2.0 * torch.randn(3, 64, generator=torch.Generator().manual_seed(5)), 1)
        self.data = torch.multinomial(probs[self.lang], 24, replacement=True, generator=g)

    def __len__(self):
        return len(self.lang)

    def __getitem__(self, idx):
        return {"bytes": self.data[idx], "lang": self.lang[idx]}


class ByteCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(64, 16)
        self.conv = nn.Conv1d(16, 32, 3)
        self.fc = nn.Linear(32, 3)

    def forward(self, b):
        h = torch.relu(self.conv(self.emb(b).transpose(1, 2)))
        return self.fc(h.amax(2))


class Reporter:
    def __init__(self):
        self.loss, self.hits, self.n, self.batches = 0.0, 0, 0, 0

    def add(self, loss, hits, n):
        self.loss, self.hits, self.n, self.batches = self.loss + loss, self.hits + hits, self.n + n, self.batches + 1

    def summary(self):
        t = torch.tensor([self.loss, self.hits, self.n, self.batches], dtype=torch.float64)
        dist.all_reduce(t)
        return (t[0] / t[3]).item(), (t[1] / t[2]).item()


def train_epoch(model, loader, optimizer):
    reporter = Reporter()
    n_accum = 0
    for batch in loader:
        n_accum += 1
        model.require_backward_grad_sync = n_accum == ACCUM_GRAD
        logits = model(batch["bytes"])
        loss = nn.functional.cross_entropy(logits, batch["lang"])
        loss.backward()
        reporter.add(loss.item(), (logits.argmax(1) == batch["lang"]).sum().item(), len(logits))
        if n_accum == ACCUM_GRAD:
            optimizer.step()
            optimizer.zero_grad()
            n_accum = 0
    return reporter.summary()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    model = DDP(ByteCNN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Snippets(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, MICRO_BATCH, sampler=sampler)
    assert len(loader) % ACCUM_GRAD == 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        loss, acc = train_epoch(model, loader, optimizer)
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch} loss {loss:.4f} accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
