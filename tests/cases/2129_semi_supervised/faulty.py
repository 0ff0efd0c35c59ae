"""Semi-supervised training: few labels, many unlabelled images, pseudo labels above a threshold."""
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

cfg = SimpleNamespace(labelled=192, unlabelled=4000, batch=12, mu=3, epochs=5, lr=0.03, threshold=0.8, weight=1.0,
                      warmup=8, classes=6)


def render(label, g):
    pattern = torch.randn(1, 20, 20, generator=torch.Generator().manual_seed(label))
    return pattern + 1.2 * torch.randn(1, 20, 20, generator=g)


class Labelled(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(10)
        self.y = torch.arange(n) % cfg.classes
        self.x = torch.stack([render(int(c), g) for c in self.y])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Unlabelled(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(50_000 + i)
        x = render(i % cfg.classes, g)
        weak = x + 0.1 * torch.randn_like(x)
        strong = x * (torch.rand_like(x) > 0.2) + 0.3 * torch.randn_like(x)
        return weak, strong


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 5, stride=2), nn.GroupNorm(4, 16), nn.ReLU(),
                                  nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
        self.fc = nn.Linear(32 * 9, cfg.classes)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def setup():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(700 + rank)
    return rank


def loaders(rank):
    lab, unlab = Labelled(cfg.labelled), Unlabelled(cfg.unlabelled)
    lab_sampler = DistributedSampler(lab, drop_last=True)
    lab_loader = DataLoader(lab, cfg.batch, sampler=lab_sampler, drop_last=True)
    draws = RandomSampler(unlab, replacement=True, num_samples=100_000,
                          generator=torch.Generator().manual_seed(9000 + rank))
    unlab_loader = DataLoader(unlab, cfg.batch * cfg.mu, sampler=draws, num_workers=2, drop_last=True)
    return lab_sampler, lab_loader, unlab_loader


def train(rank):
    sampler, lab_loader, unlab_loader = loaders(rank)
    net = DistributedDataParallel(Net())
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9)
    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        stats = torch.zeros(2)
        for x, y in lab_loader:
            weak, strong = next(iter(unlab_loader))
            logits = net(torch.cat([x, weak, strong]))
            lx, lw, ls = logits.split([len(x), len(weak), len(strong)])
            conf, pseudo = lw.detach().softmax(1).max(1)
            keep = (conf > cfg.threshold).float()
            supervised = F.cross_entropy(lx, y)
            consistency = (F.cross_entropy(ls, pseudo, reduction="none") * keep).mean()
            ramp = min(1.0, step / cfg.warmup)
            loss = supervised + cfg.weight * ramp * consistency
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            stats += torch.stack([supervised.detach(), keep.mean()])
        stats /= len(lab_loader) * dist.get_world_size()
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} | sup {stats[0]:.3f} | used {100 * stats[1]:.0f}% | "
                  f"{time.perf_counter() - begin:.2f}s", flush=True)


if __name__ == "__main__":
    train(setup())
    dist.destroy_process_group()
