"""Bi-encoder for query/passage retrieval, with the passages of all ranks as in-batch negatives."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather as gather_with_grad
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB = 400


class PairSet(Dataset):
    """Query = a few words of the passage, in another order."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.passages = torch.randint(1, VOCAB, (n, 12), generator=g)
        pick = torch.stack([torch.randperm(12, generator=g)[:5] for _ in range(n)])
        self.queries = self.passages.gather(1, pick)

    def __len__(self):
        return len(self.passages)

    def __getitem__(self, i):
        return self.queries[i], self.passages[i]


class BiEncoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.query_head = nn.Linear(dim, dim)
        self.passage_head = nn.Linear(dim, dim)

    def forward(self, queries, passages):
        q = F.normalize(self.query_head(self.emb(queries)), dim=1)
        p = F.normalize(self.passage_head(self.emb(passages)), dim=1)
        return q, p


class MultipleNegativesLoss:
    """Cross entropy over the passages of all devices; the gather is differentiable."""

    def __init__(self, scale=20.0):
        self.scale = scale
        self.rank = dist.get_rank()

    def gather(self, p):
        return torch.cat(gather_with_grad(p.contiguous()))

    def __call__(self, q, p):
        candidates = self.gather(p)
        scores = self.scale * q @ candidates.T
        offset = self.rank * len(q)
        labels = torch.arange(offset, offset + len(q), device=q.device)
        return F.cross_entropy(scores, labels)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(BiEncoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loss_fn = MultipleNegativesLoss()

    pairs = PairSet(320, seed=8)
    sampler = DistributedSampler(pairs, shuffle=True, drop_last=True)
    loader = DataLoader(pairs, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for queries, passages in loader:
            q, p = model(queries, passages)
            loss = loss_fn(q, p)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
