"""Image classifier; the first process also keeps an exponential average of the weights."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tiles(n, seed):
    proto = 2 * torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    return TensorDataset(3 + proto[y] + torch.randn(n, 3, 8, 8, generator=g), y)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(96, 4),
    )


class Averaged:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(theirs, 1 - self.decay)


@torch.no_grad()
def score(net, loader):
    was_training = net.training
    net.eval()
    hits = n = 0
    for x, y in loader:
        hits += (net(x).argmax(1) == y).sum().item()
        n += len(y)
    net.train(was_training)
    return hits / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--decay", type=float, default=0.9)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    net = network()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train_set = tiles(256, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    test_loader = DataLoader(tiles(128, 2), batch_size=64)
    averaged = Averaged(net, args.decay) if rank == 0 else None

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if averaged:
                averaged.update(net)
        if averaged:
            print(f"epoch {epoch}: accuracy {score(net, test_loader):.3f}, averaged {score(averaged.net, test_loader):.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
