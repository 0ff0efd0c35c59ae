"""Poisson regression of counts with exposure; a hand-written likelihood."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RateNet(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.Softplus(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.body(x).squeeze(1)


def claims(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 7, generator=g)
    exposure = 0.5 + torch.rand(n, generator=g)
    rate = torch.exp(0.4 * x[:, 0] - 0.3 * x[:, 1] * x[:, 2])
    return TensorDataset(x, exposure, torch.poisson(rate * exposure, generator=g))


poisson = nn.PoissonNLLLoss(log_input=True, reduction="sum")


def main(args):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    model = DDP(RateNet(7, args.hidden))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train, test = claims(480, 1), claims(160, 2)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, exposure, count in loader:
            log_mu = model(x) + exposure.log()
            loss = poisson(log_mu, count)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            x, exposure, count = (t[rank::world] for t in test.tensors)
            nll = nn.functional.poisson_nll_loss(model.module(x) + exposure.log(), count, reduction="none").sum()
        dist.all_reduce(nll)
        if rank == 0:
            print(f"epoch {epoch}: test nll per policy {nll.item() / len(test):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--batch", type=int, default=20)
    ap.add_argument("--hidden", type=int, default=24)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--seed", type=int, default=9)
    main(ap.parse_args())
