"""Gradient accumulation helper in the manner of accelerate's accumulate()."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Accumulator:
    def __init__(self, model, optimizer, steps):
        self.model, self.optimizer, self.steps = model, optimizer, steps
        self.micro = 0

    def start_epoch(self):
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def accumulate(self):
        """Communicates on every steps-th micro-batch only."""
        self.micro += 1
        if self.micro % self.steps == 0:
            yield
        else:
            with self.model.no_sync():
                yield

    def step(self, index):
        if (index + 1) % self.steps:
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Classifier(nn.Module):
    def __init__(self, vocab=40, dim=24, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.enc = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(dim, classes)

    def forward(self, tokens):
        return self.out(self.enc(self.emb(tokens)).mean(1))


def topics(n):
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (n,), generator=g)
    own = torch.rand(n, 12, generator=g) < 0.35
    words = torch.where(own, 10 * y[:, None] + torch.randint(0, 10, (n, 12), generator=g), torch.randint(0, 40, (n, 12), generator=g))
    return TensorDataset(words, y)


def main(epochs=4, steps=3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DDP(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    helper = Accumulator(model, optimizer, steps)
    data = topics(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    usable = len(loader) - len(loader) % steps  # 9 of 10; the rest goes with the epoch's end
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        helper.start_epoch()
        total = torch.zeros(2)
        for i, (tokens, y) in enumerate(loader):
            with helper.accumulate():
                loss = nn.functional.cross_entropy(model(tokens), y)
                (loss / steps).backward()
            helper.step(i)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {usable // steps} updates, loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
