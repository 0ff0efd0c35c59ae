"""Two tasks, one trunk: depth regression and class prediction with learned task weights."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Scenes(Dataset):
    def __init__(self, n=280):
        g = torch.Generator().manual_seed(28)
        self.x = torch.randn(n, 16, generator=g)
        mix = torch.randn(16, 5, generator=g)
        self.cls = (self.x @ mix).argmax(1)
        self.depth = self.x[:, :4].square().sum(1) + 0.5 * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "cls": self.cls[i], "depth": self.depth[i]}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.cls = nn.Linear(64, 5)
        self.depth = nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.cls(h), self.depth(h).squeeze(1)


class WeightedTasks(nn.Module):
    """Homoscedastic weighting: every task has a trainable log variance."""

    def __init__(self, tasks=2):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(tasks))

    def forward(self, outputs, batch):
        losses = torch.stack([F.cross_entropy(outputs[0], batch["cls"]), F.mse_loss(outputs[1], batch["depth"])])
        return (torch.exp(-self.log_var) * losses + self.log_var).sum(), losses.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=14)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    model = DDP(TwoHeads())
    criterion = DDP(WeightedTasks())
    optimizer = torch.optim.AdamW(itertools.chain(model.parameters(), criterion.parameters()), lr=args.lr)
    data = Scenes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for batch in loader:
            loss, parts = criterion(model(batch["x"]), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += parts
        dist.all_reduce(sums)
        sums /= dist.get_world_size() * len(loader)
        if rank == 0:
            print(f"epoch {epoch}: class loss {sums[0].item():.4f}, depth loss {sums[1].item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
