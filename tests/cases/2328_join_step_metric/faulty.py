"""Session-level purchase prediction; processes own different numbers of sessions."""
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


@dataclass
class Settings:
    epochs: int = 5
    batch_size: int = 16
    lr: float = 0.5
    items: int = 50
    dim: int = 32
    seed: int = 14
    sessions: list = field(default_factory=lambda: [560, 432])


class Sessions(Dataset):
    """Users are hashed to a process, so the share of each one differs."""

    def __init__(self, cfg, n, seed):
        affinity = torch.randn(cfg.items, generator=torch.Generator().manual_seed(90))
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(4, 16, (1,), generator=g))
            items = torch.randint(0, cfg.items, (length,), generator=g)
            recency = torch.linspace(0.3, 1.0, length)
            label = (affinity[items] * recency).sum() > 0
            self.rows.append((items, label.float()))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    items, labels = zip(*rows)
    lengths = torch.tensor([len(r) for r in items])
    return pad_sequence(items, batch_first=True), lengths, torch.stack(labels)


class SessionModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.emb = nn.Embedding(cfg.items, cfg.dim)
        self.gru = nn.GRU(cfg.dim, cfg.dim, batch_first=True)
        self.out = nn.Linear(cfg.dim, 1)

    def forward(self, items, lengths):
        packed = pack_padded_sequence(self.emb(items), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        return self.out(h[-1]).squeeze(1)


def train_epoch(model, loader, optimizer, criterion):
    total = torch.zeros(2)
    with model.join():
        for items, lengths, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(items, lengths), labels)
            loss.backward()
            optimizer.step()
            batch = torch.tensor([loss.item() * len(labels), float(len(labels))])
            dist.all_reduce(batch)
            total += batch
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for items, lengths, labels in loader:
        pred = model.module(items, lengths) > 0
        hits += torch.tensor([(pred == labels.bool()).sum().item(), float(len(labels))])
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def main():
    cfg = Settings()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed)
    model = DDP(SessionModel(cfg))

    own = cfg.sessions[rank % len(cfg.sessions)]
    shuffle = torch.Generator().manual_seed(cfg.seed * 10 + rank)
    train_loader = DataLoader(Sessions(cfg, own, seed=100 + rank), batch_size=cfg.batch_size, shuffle=True,
                              generator=shuffle, collate_fn=collate)
    test_loader = DataLoader(Sessions(cfg, 200, seed=500 + rank), batch_size=64, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    criterion = nn.BCEWithLogitsLoss()

    best = 0.0
    for epoch in range(cfg.epochs):
        loss = train_epoch(model, train_loader, optimizer, criterion)
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} accuracy {acc:.3f}", flush=True)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "sessions.tmp")
                os.replace("sessions.tmp", "sessions.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
