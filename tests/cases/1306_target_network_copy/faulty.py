"""Self-supervised pairs of views with a slowly moving target encoder."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Online(nn.Module):
    def __init__(self, dim=20, width=48, out=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, out))
        self.predictor = nn.Sequential(nn.Linear(out, width), nn.ReLU(), nn.Linear(width, out))

    def forward(self, x):
        return self.predictor(self.encoder(x))


def view(x):
    keep = (torch.rand_like(x) > 0.2).float()
    return x * keep + 0.1 * torch.randn_like(x)


@torch.no_grad()
def follow(target, source, tau):
    for t, s in zip(target.parameters(), source.parameters()):
        t.mul_(tau).add_(s, alpha=1 - tau)


def clusters(n=320):
    g = torch.Generator().manual_seed(12)
    centers = 2 * torch.randn(6, 20, generator=g)
    return TensorDataset(centers[torch.randint(0, 6, (n,), generator=g)] + 0.4 * torch.randn(n, 20, generator=g))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--tau", type=float, default=0.99)
    ap.add_argument("--seed", type=int, default=100)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(args.seed + rank)  # own views on every process

    net = Online()
    target = copy.deepcopy(net.encoder).requires_grad_(False)
    model = DistributedDataParallel(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = clusters()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            a, b = view(x), view(x)
            guess = model(torch.cat([a, b]))
            with torch.no_grad():
                goal = target(torch.cat([b, a]))
            loss = (2 - 2 * F.cosine_similarity(guess, goal, dim=1)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            follow(target, net.encoder, args.tau)
        if rank == 0:
            print(f"epoch {epoch}: alignment {loss.item():.4f}")
    if rank == 0:
        torch.save(target.state_dict(), "encoder.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
