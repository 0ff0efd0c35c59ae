"""Ranking of web pages: train a scorer, gather all test scores, compute the AUC once."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def clicks(n, seed, dim=14):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    p = torch.sigmoid(2 * x[:, 0] - x[:, 1] * x[:, 2])
    return TensorDataset(x, (torch.rand(n, generator=g) < p).float())


def auc(score, label):
    order = score.argsort()
    rank = torch.empty_like(score)
    rank[order] = torch.arange(1, len(score) + 1, dtype=score.dtype)
    pos = label.sum()
    neg = len(label) - pos
    return ((rank[label == 1].sum() - pos * (pos + 1) / 2) / (pos * neg)).item()


def gather_all(t):
    """Concatenation of `t` over the ranks."""
    world = dist.get_world_size()
    out = [torch.zeros_like(t) for _ in range(world)]
    dist.all_gather(out, t)
    return torch.cat(out)


@torch.no_grad()
def evaluate(net, dataset, rank, world):
    net.eval()
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=17)
    scores, labels = [], []
    for x, y in loader:
        scores.append(net(x).squeeze(1))
        labels.append(y)
    net.train()
    return auc(gather_all(torch.cat(scores)), gather_all(torch.cat(labels)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 1))
    model = DDP(net)
    torch.manual_seed(50 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    train_set, test_set = clicks(512, 1), clicks(101, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = evaluate(net, test_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: test auc {value:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
