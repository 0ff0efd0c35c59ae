"""Unsupervised domain adaptation (gradient reversal) on two synthetic domains, DDP."""
import argparse
import os
from itertools import cycle

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None


class Backbone(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())

    def forward(self, x):
        return self.net(x)


class Adapter(nn.Module):
    """Holds the three parts so that one optimizer and one wrapper see all of them."""

    def __init__(self, backbone, classifier, discriminator):
        super().__init__()
        self.backbone = backbone
        self.classifier = classifier
        self.discriminator = discriminator

    def forward(self, xs, xt, lam):
        fs, ft = self.backbone(xs), self.backbone(xt)
        feats = Reverse.apply(torch.cat([fs, ft]), lam)
        return self.classifier(fs), self.discriminator(feats).squeeze(1)


def domain(n, shift, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 16, generator=g) + shift
    x[torch.arange(n), y] += 3.0
    return TensorDataset(x, y)


def make_loader(ds, bs, seed):
    sampler = DistributedSampler(ds, shuffle=True, seed=seed)
    return DataLoader(ds, batch_size=bs, sampler=sampler, drop_last=True), sampler


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--bs", type=int, default=16)
    p.add_argument("--lam", type=float, default=0.3)
    args = p.parse_args()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    torch.manual_seed(7)

    backbone, classifier = Backbone(32), nn.Linear(32, 4)
    discriminator = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    adapter = DDP(Adapter(backbone, classifier, discriminator).to(device))
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.03, momentum=0.9)

    source, s_sampler = make_loader(domain(320, 0.0, 1), args.bs, 1)
    target, t_sampler = make_loader(domain(256, 0.7, 2), args.bs, 2)

    for epoch in range(args.epochs):
        s_sampler.set_epoch(epoch)
        t_sampler.set_epoch(epoch)
        adapter.train()
        sums = torch.zeros(2, device=device)
        for (xs, ys), (xt, _) in zip(source, cycle(target)):
            xs, ys, xt = xs.to(device), ys.to(device), xt.to(device)
            logits, dom = adapter(xs, xt, args.lam)
            dom_y = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))]).to(device)
            loss = F.cross_entropy(logits, ys) + F.binary_cross_entropy_with_logits(dom, dom_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item(), 1.0], device=device)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"[{epoch}] loss {sums[0] / sums[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
