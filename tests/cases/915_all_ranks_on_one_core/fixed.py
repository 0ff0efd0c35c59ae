"""CPU training with pinned processes (one core each, data and weights stay in its cache)."""
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    return ap.parse_args()


def pin(local_rank):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
    torch.set_num_threads(1)


def blobs(n=640, size=20):
    """Images with one to three blobs; count them."""
    g = torch.Generator().manual_seed(13)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    count = torch.randint(1, 4, (n,), generator=g)
    img = 0.05 * torch.randn(n, size, size, generator=g)
    for k in range(3):
        c = size * torch.rand(n, 2, 1, 1, generator=g)
        spot = torch.exp(-((xx - c[:, 0]) ** 2 + (yy - c[:, 1]) ** 2) / 6)
        img += spot * (count > k)[:, None, None]
    return TensorDataset(img.unsqueeze(1), count - 1)


class CountNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(8 * width, 3)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def main():
    args = get_args()
    pin(args.local_rank)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(CountNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = blobs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start = time.time()
        stats = torch.zeros(2)
        for img, count in loader:
            out = model(img)
            loss = F.cross_entropy(out, count)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([(out.argmax(1) == count).sum().item(), float(len(count))])
        dist.all_reduce(stats)
        if rank == 0:
            rate = stats[1].item() / (time.time() - start)
            print(f"epoch {epoch}: acc {(stats[0] / stats[1]).item():.3f}, {rate:.0f} images/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
