"""Reranker training; keeps the best weights by validation loss."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset, DistributedSampler


@dataclass
class Args:
    epochs: int = 6
    batch: int = 16
    lr: float = 0.02
    out: str = "reranker_best.pt"


def pairs(n=300):
    g = torch.Generator().manual_seed(88)
    q, d = torch.randn(n, 12, generator=g), torch.randn(n, 12, generator=g)
    rel = ((q * d).sum(1) + 1.5 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(q, d, rel)


class Reranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.bil = nn.Bilinear(12, 12, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, q, d):
        return self.out(torch.relu(self.bil(q, d))).squeeze(1)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = DDP(Reranker())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        data = pairs()
        train, val = Subset(data, range(240)), Subset(data, range(240, 300))
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, batch_size=args.batch, sampler=self.sampler)
        self.val_loader = DataLoader(val, batch_size=args.batch, sampler=DistributedSampler(val, shuffle=False))
        self.criterion = nn.BCEWithLogitsLoss()
        self.best = float("inf")

    def reduce(self, total, count):
        t = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(t)
        return (t[0] / t[1]).item()

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for q, d, rel in self.train_loader:
            loss = self.criterion(self.model(q, d), rel)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(rel)
            count += len(rel)
        return self.reduce(total, count)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total, count = 0.0, 0
        for q, d, rel in self.val_loader:
            total += self.criterion(self.model(q, d), rel).item() * len(rel)
            count += len(rel)
        return total / count, self.reduce(total, count)

    def fit(self):
        for epoch in range(self.args.epochs):
            train_loss = self.train_epoch(epoch)
            local_loss, val_loss = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch}: train {train_loss:.4f} val {val_loss:.4f}", flush=True)
                if local_loss < self.best:
                    self.best = local_loss
                    torch.save(self.model.module.state_dict(), self.args.out)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(Args()).fit()
    dist.destroy_process_group()
