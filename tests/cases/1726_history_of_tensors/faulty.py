"""Contrastive pretraining with a callback that records diagnostics."""
import argparse
import os
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pairs(Dataset):
    def __init__(self, n=2048, dim=96):
        self.base = torch.randn(n, dim, generator=torch.Generator().manual_seed(14))

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        x = self.base[i]
        return x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)


class Projector(nn.Module):
    def __init__(self, dim=96, width=512, out=512):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, out))

    def forward(self, a, b):
        z = F.normalize(self.net(torch.cat([a, b])), dim=1)
        return z.chunk(2)


def info_nce(za, zb, temperature=0.2):
    logits = za @ zb.t() / temperature
    target = torch.arange(len(za))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


class Diagnostics:
    def __init__(self):
        self.rows = defaultdict(list)

    def on_batch_end(self, loss, za, zb):
        spread = torch.cdist(za, za).mean()
        align = (za - zb).pow(2).sum(1).mean()
        self.rows["loss"].append(loss.item())
        self.rows["spread"].append(spread)
        self.rows["align"].append(align)

    def summary(self, last):
        return {k: float(sum(float(v) for v in vs[-last:]) / last) for k, vs in self.rows.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch-size", type=int, default=128)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Projector())
    torch.manual_seed(100 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = Pairs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    diag = Diagnostics()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for a, b in loader:
            za, zb = model(a, b)
            loss = info_nce(za, zb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            diag.on_batch_end(loss, za, zb)
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{k} {v:.4f}" for k, v in diag.summary(len(loader)).items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
