"""Audio-like classification; three spawned processes, sharded validation."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def tones(n, seed):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=gen)
    t = torch.linspace(0, 1, 128)[None]
    f = 4.0 + 3 * y[:, None] + torch.randn(n, 1, generator=gen)
    x = torch.sin(6.28 * f * t + 6 * torch.rand(n, 1, generator=gen)) + 0.5 * torch.randn(n, 128, generator=gen)
    return TensorDataset(x[:, None], y)


def network():
    return nn.Sequential(
        nn.Conv1d(1, 12, 9, stride=2), nn.ReLU(), nn.Conv1d(12, 16, 9, stride=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 4)
    )


class Accuracy:
    def __init__(self):
        self.correct = 0
        self.total = 0

    def update(self, logits, y):
        self.correct += (logits.argmax(1) == y).sum().item()
        self.total += len(y)

    def sync(self):
        counts = torch.tensor([self.correct, self.total])
        dist.all_reduce(counts)
        self.correct, self.total = counts.tolist()

    def compute(self):
        self.sync()
        return self.correct / max(1, self.total)


def validate(model, data, rank, world, batch):
    part = Subset(data, range(rank, len(data), world))
    metric = Accuracy()
    model.eval()
    with torch.inference_mode():
        for x, y in DataLoader(part, batch_size=batch):
            metric.update(model(x), y)
    model.train()
    return metric.compute()


def train(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(args.seed)
    model = DDP(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data, val = tones(480, 1), tones(150, 2)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = validate(model, val, rank, world, args.batch)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--world", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=27)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(args.world, os.path.join(folder, "store"), args), nprocs=args.world)


if __name__ == "__main__":
    main()
