"""Masked-token model with an optional reduced precision."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MASK = 0


class Progressions(Dataset):
    """Arithmetic progressions modulo the vocabulary, with one hidden element."""

    def __init__(self, n=320, length=10, vocab=24):
        g = torch.Generator().manual_seed(81)
        start = torch.randint(1, vocab, (n, 1), generator=g)
        step = torch.randint(1, 4, (n, 1), generator=g)
        self.seq = (start + step * torch.arange(length)) % (vocab - 1) + 1
        self.hidden = torch.randint(0, length, (n,), generator=g)

    def __len__(self):
        return len(self.seq)

    def __getitem__(self, i):
        tokens = self.seq[i].clone()
        where = self.hidden[i]
        target = tokens[where].clone()
        tokens[where] = MASK
        return tokens, where, target


class MaskedModel(nn.Module):
    def __init__(self, vocab=24, length=10, width=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens, where):
        h = self.encoder(self.tok(tokens) + self.pos)
        return self.head(h[torch.arange(len(h)), where])


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        self.device = torch.device(args.device)
        torch.manual_seed(2)
        self.model = DistributedDataParallel(MaskedModel().to(self.device))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        data = Progressions()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler)

    def step(self, tokens, where, target):
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.args.bf16):
            logits = self.model(tokens, where)
        loss = nn.functional.cross_entropy(logits.float(), target)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach(), logits.dtype

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                loss, dtype = self.step(*(t.to(self.device) for t in batch))
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f} ({dtype})", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Trainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
