"""Image-like classifier; a slowly moving average of the weights is what gets evaluated and saved."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(10).float()
    rows = torch.stack([torch.sin(t * (0.6 + 0.5 * k)) for k in range(4)])
    x = rows[y].view(n, 1, 1, 10).expand(n, 1, 10, 10) + 0.6 * torch.randn(n, 1, 10, 10, generator=g)
    return TensorDataset(40 + 12 * x, y)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 5)),
        nn.Flatten(), nn.Linear(80, 4),
    )


class Averaged:
    def __init__(self, model, decay):
        self.shadow = copy.deepcopy(model).eval()
        self.shadow.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.shadow.parameters(), model.parameters()):
            mine.lerp_(theirs, 1 - self.decay)

    def share(self):
        for tensor in self.shadow.buffers():
            dist.broadcast(tensor, src=0)


@torch.no_grad()
def score(net, data, rank, world):
    loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=50)
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(net(x).argmax(1) == y).float().sum(), float(len(y))])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--decay", type=float, default=0.9)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    model = DistributedDataParallel(build())
    average = Averaged(model.module, args.decay)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, test = stripes(384, 1), stripes(200, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=24, sampler=sampler)

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            average.update(model.module)
        average.share()
        acc = score(average.shadow, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, averaged model {acc:.3f}", flush=True)

    if rank == 0:
        torch.save(average.shadow.state_dict(), os.path.join(os.getcwd(), "averaged.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
