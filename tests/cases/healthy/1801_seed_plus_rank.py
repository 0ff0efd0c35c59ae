"""Image-like classifier; every process gets its own random state on purpose."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Stripes(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(3)
        self.kind = torch.randint(0, 2, (n,), generator=g)

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        image = 0.8 * torch.randn(1, 8, 8)
        image[0, :: 2 if self.kind[i] else 4] += 1
        return image, self.kind[i]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--seed", type=int, default=30)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout2d(0.1), nn.Flatten(), nn.Linear(288, 2))
    model = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    data = Stripes()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            opt.zero_grad()
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
            hits += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: {(hits[0] / hits[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
