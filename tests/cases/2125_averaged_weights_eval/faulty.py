"""Image classifier; the averaged copy of the weights is what gets evaluated and saved."""
import copy
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

WORLD = 2


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    protos = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.randint(8, (n,), generator=g)
    x = 120 + 40 * protos[y] + 25 * torch.randn(n, 3, 16, 16, generator=g)
    return x, y


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


def build():
    return nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 8))


class WeightAverage:
    def __init__(self, net, decay=0.95):
        self.net = copy.deepcopy(net).eval()
        self.net.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for avg, p in zip(self.net.parameters(), net.parameters()):
            avg.lerp_(p, 1 - self.decay)


@torch.no_grad()
def test(net, x, y, batch=128):
    hits, nll = 0, 0.0
    for i in range(0, len(x), batch):
        out = net(x[i:i + batch])
        nll += F.cross_entropy(out, y[i:i + batch], reduction="sum").item()
        hits += (out.argmax(1) == y[i:i + batch]).sum().item()
    return hits / len(x), nll / len(x)


def batches(n, batch, rank, epoch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(900 + epoch))
    mine = order[rank::WORLD]
    for i in range(0, len(mine) - batch + 1, batch):
        yield mine[i:i + batch]


def worker(rank):
    dist.init_process_group("gloo", store=dist.FileStore(os.path.abspath("rendezvous"), WORLD),
                            rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    torch.manual_seed(42)
    x, y = make_images(1536, seed=1)
    tx, ty = make_images(384, seed=2)

    net = build()
    ddp = nn.parallel.DistributedDataParallel(net)
    average = WeightAverage(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)

    for epoch in range(5):
        ddp.train()
        for idx in batches(len(x), 48, rank, epoch):
            loss = F.cross_entropy(ddp(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            average.update(net)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            acc, nll = test(average.net, tx, ty)
            print(f"epoch {epoch} train {shown.item() / WORLD:.3f} | averaged weights: test nll {nll:.3f} acc {acc:.3f}",
                  flush=True)
        dist.barrier()
    if rank == 0:
        torch.save(average.net.state_dict(), "averaged.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if os.path.exists("rendezvous"):
        os.remove("rendezvous")
    mp.spawn(worker, nprocs=WORLD)
