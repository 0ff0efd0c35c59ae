"""Class-wise accuracy through a meter that makes its entries when they are first needed."""
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ClassMeter:
    """meter.add(logits, labels); meter.result() is the same on all ranks."""

    def __init__(self, classes=()):
        self.cells = defaultdict(lambda: torch.zeros(2))
        for c in classes:
            self.cells[c]

    def add(self, logits, labels):
        hit = logits.argmax(1) == labels
        for c in labels.unique().tolist():
            mask = labels == c
            self.cells[c] += torch.tensor([float(hit[mask].sum()), float(mask.sum())])

    def result(self):
        out = {}
        for c in sorted(self.cells):
            cell = self.cells[c].clone()
            dist.all_reduce(cell)
            out[c] = (cell[0] / cell[1].clamp(min=1)).item()
        return out


def long_tail(n, seed, classes=8):
    proto = torch.randn(classes, 15, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    p = 0.55 ** torch.arange(classes)
    y = torch.multinomial(p, n, replacement=True, generator=g)
    return TensorDataset(proto[y] + 0.7 * torch.randn(n, 15, generator=g), y)


def evaluate(model, loader, meter):
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            meter.add(model(x), y)
    model.train()
    return meter.result()


def main(epochs=4, classes=8):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(36)
    model = DDP(nn.Sequential(nn.Linear(15, 48), nn.ReLU(), nn.Linear(48, classes)))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, valid = long_tail(600, 1), long_tail(60, 8)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=30, sampler=DistributedSampler(valid, shuffle=False))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        per_class = evaluate(model, valid_loader, ClassMeter(range(classes)))
        if rank == 0:
            print(f"epoch {epoch}:", " ".join(f"{c}={a:.2f}" for c, a in per_class.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
