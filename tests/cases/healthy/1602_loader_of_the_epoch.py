"""Image rotation task; the loader is built anew for every epoch."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rotations(Dataset):
    def __init__(self, n=256, size=8):
        g = torch.Generator().manual_seed(90)
        ramp = torch.linspace(-1, 1, size).expand(1, size, size)
        self.turn = torch.randint(0, 4, (n,), generator=g)
        self.image = torch.stack([torch.rot90(ramp, k, (1, 2)) for k in self.turn.tolist()])
        self.image = self.image + 0.8 * torch.randn(n, 1, size, size, generator=g)

    def __len__(self):
        return len(self.turn)

    def __getitem__(self, i):
        return self.image[i], self.turn[i]


def loader_for(data, epoch, batch_size):
    sampler = DistributedSampler(data, shuffle=True, seed=1000 + epoch)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(4)
    data = Rotations()
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(108, 4))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        hits = torch.zeros(2)
        for image, turn in loader_for(data, epoch, args.batch_size):
            out = model(image)
            loss = nn.functional.cross_entropy(out, turn)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits += torch.tensor([(out.argmax(1) == turn).sum().item(), len(turn)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(hits[0] / hits[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
