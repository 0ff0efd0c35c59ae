"""Sequence labelling in half precision with a loss scaler."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Brackets(Dataset):
    """Label every position with the current nesting depth (0..3)."""

    def __init__(self, n=256, length=20):
        g = torch.Generator().manual_seed(23)
        self.tokens = torch.randint(0, 2, (n, length), generator=g)
        depth = torch.zeros(n, dtype=torch.long)
        self.labels = torch.zeros_like(self.tokens)
        for t in range(length):
            depth = (depth + 2 * self.tokens[:, t] - 1).clamp(0, 3)
            self.labels[:, t] = depth

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.labels[i]


class Labeller(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(2, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 3) for _ in range(4))
        self.head = nn.Linear(dim, 4)

    def forward(self, tokens):
        h = self.embed(tokens).transpose(1, 2)
        for i, conv in enumerate(self.convs):
            h = h + torch.relu(conv(F.pad(h, (2, 0))))
        return self.head(h.transpose(1, 2))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Labeller())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    data = Brackets()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens)
                loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            scaler.step(opt)
            scaler.update()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
