"""Causal transformer on arithmetic sequences of very different lengths."""
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = 0
VOCAB = 24


class Sequences(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(9)
        self.rows = []
        for i in range(n):
            length = 4 if torch.rand((), generator=g) < 0.7 else int(torch.randint(20, 32, (), generator=g))
            start, step = torch.randint(0, 23, (2,), generator=g).tolist()
            self.rows.append(1 + (start + step * torch.arange(length)) % (VOCAB - 1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    padded = pad_sequence(rows, batch_first=True, padding_value=PAD)
    return padded[:, :-1], padded[:, 1:]


class TinyLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(32, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        n = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        h = self.tok(ids) + self.pos(torch.arange(n))
        return self.out(self.body(h, mask=mask, is_causal=True))


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def update(model, opt, window):
    tokens = torch.tensor(float(sum((target != PAD).sum().item() for _, target in window)))
    dist.all_reduce(tokens)
    total = 0.0
    for k, (ids, target) in enumerate(window):
        with nullcontext() if k + 1 == len(window) else model.no_sync():
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD) / len(window)
            loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return total, int(tokens)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(TinyLM())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Sequences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler, collate_fn=collate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for window in windows(loader, args.accum):
            loss, tokens = update(model, opt, window)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {tokens} tokens in the last update", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
