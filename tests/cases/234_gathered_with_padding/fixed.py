"""Retrieval-like ranking scores; predictions are collected from all ranks before the metric is computed."""
import itertools
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.q, self.d = torch.randn(n, 8, generator=g), torch.randn(n, 8, generator=g)
        self.y = ((self.q * self.d).sum(1) + 0.5 * torch.randn(n, generator=g) > 1).float()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.q[i], self.d[i], self.y[i]


class CrossScorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, q, d):
        return self.out(torch.relu(self.bilinear(q, d))).squeeze(1)


def average_precision(scores, labels):
    order = np.argsort(-np.asarray(scores), kind="stable")
    hit = np.asarray(labels)[order]
    precision = np.cumsum(hit) / np.arange(1, len(hit) + 1)
    return float((precision * hit).sum() / max(1.0, hit.sum()))


class EvalSampler:
    """rank, rank + world, ...: every sample once, the last rank may have one less"""

    def __init__(self, dataset):
        self.indices = range(dist.get_rank(), len(dataset), dist.get_world_size())

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


def predict_all(model, dataset):
    loader = DataLoader(dataset, 16, sampler=EvalSampler(dataset))
    mine = []
    model.eval()
    with torch.no_grad():
        for q, d, y in loader:
            mine.extend(zip(model(q, d).tolist(), y.tolist()))
    model.train()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return list(itertools.chain.from_iterable(parts))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    net = CrossScorer()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = Pairs(384, 1), Pairs(87, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 24, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for q, d, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(q, d), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        results = predict_all(net, test)
        if rank == 0:
            print(f"epoch {epoch}: average precision {average_precision(*zip(*results)):.4f} on {len(results)} pairs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
