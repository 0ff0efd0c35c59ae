"""Defect classifier; predictions of the sharded test set are gathered and scored together."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

CLASSES = 3


def gather_ragged(t):
    """all_gather for 1-d tensors whose length differs between ranks."""
    length = torch.tensor([len(t)])
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(n.item() for n in lengths)
    padded = F.pad(t, (0, longest - len(t)))
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat(parts)


class Confusion:
    def __init__(self, pred, true):
        self.table = torch.bincount(true * CLASSES + pred, minlength=CLASSES**2).view(CLASSES, CLASSES)

    def accuracy(self):
        return (self.table.trace() / self.table.sum()).item()

    def recall(self):
        return (self.table.diagonal() / self.table.sum(1).clamp_min(1)).tolist()


def plates(n, seed):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=gen)
    x = 0.7 * torch.randn(n, 1, 9, 9, generator=gen)
    rows = torch.where(y == 1)[0]
    x[rows, :, 4] += 1.0
    rows = torch.where(y == 2)[0]
    x[rows, :, :, 4] += 1.0
    return TensorDataset(x, y)


@torch.no_grad()
def test(model, data, batch):
    rank, world = dist.get_rank(), dist.get_world_size()
    per = -(-len(data) // world)
    part = Subset(data, range(rank * per, min(len(data), (rank + 1) * per)))
    model.eval()
    preds, trues = [], []
    for x, y in DataLoader(part, batch_size=batch):
        preds.append(model(x).argmax(1))
        trues.append(y)
    model.train()
    return Confusion(gather_ragged(torch.cat(preds)), gather_ragged(torch.cat(trues)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--lr", type=float, default=5e-3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(44)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(200, CLASSES))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train_set, test_set = plates(360, 1), plates(100, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        result = test(model, test_set, args.batch)
        if dist.get_rank() == 0:
            recall = " ".join(f"{r:.2f}" for r in result.recall())
            print(f"epoch {epoch}: test accuracy {result.accuracy():.3f}, recall {recall}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
