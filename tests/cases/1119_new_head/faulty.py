"""Fine-tuning: an encoder trained on one task gets a classifier for another one."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tokens(Dataset):
    """Which of the symbols 0..4 occurs most often?"""

    def __init__(self, n=400, length=11, symbols=5):
        g = torch.Generator().manual_seed(41)
        self.label = torch.randint(0, symbols, (n,), generator=g)
        self.seq = torch.randint(0, symbols, (n, length), generator=g)
        boost = torch.rand(n, length, generator=g) < 0.4
        self.seq = torch.where(boost, self.label.unsqueeze(1), self.seq)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.seq[i], self.label[i]


class Encoder(nn.Module):
    def __init__(self, symbols=5, dim=32, classes=12):
        super().__init__()
        self.embed = nn.Embedding(symbols, dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, seq):
        h = self.embed(seq)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        return self.head(h.mean(1))


def pretrained():
    """Stands for weights that would come from a file."""
    torch.manual_seed(123)
    return Encoder(classes=12)


def evaluate(model, loader):
    hits = torch.zeros(2)
    with torch.no_grad():
        for seq, label in loader:
            hits += torch.tensor([(model(seq).argmax(1) == label).sum().item(), len(label)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--classes", type=int, default=5)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    net = pretrained()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    net.head = nn.Linear(net.head.in_features, args.classes)
    model = DDP(net)

    data = Tokens()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for seq, label in loader:
            loss = nn.functional.cross_entropy(model(seq), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy on the training set {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
