"""Many short epochs over a small dataset."""
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Rotated(Dataset):
    """Few shapes, rotated at random whenever they are read."""

    def __init__(self, n=96):
        g = torch.Generator().manual_seed(92)
        self.kind = torch.randint(0, 3, (n,), generator=g)
        self.corners = 3 + self.kind
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        k = int(self.corners[i])
        angle = 6.2832 * (torch.arange(10) % k) / k + 6.2832 * torch.rand(())
        return torch.cat([angle.cos(), angle.sin()]) + 0.05 * torch.randn(20), self.kind[i]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=12)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)

    data = Rotated()
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers, persistent_workers=True
    )
    model = DDP(nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    start = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, kind in loader:
            loss = nn.functional.cross_entropy(model(x), kind)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch}: {time.time() - start:.1f} s, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
