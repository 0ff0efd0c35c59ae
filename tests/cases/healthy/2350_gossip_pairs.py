"""Decentralised SGD: local steps, every few of them a mixing with a randomly matched peer."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ConvNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.GroupNorm(4, 24), nn.ReLU())
        self.head = nn.Linear(24 * 9, classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def images(n, gen, classes=5):
    y = torch.randint(classes, (n,), generator=gen)
    img = 0.6 * torch.randn(n, 1, 12, 12, generator=gen)
    r = torch.randint(1, 10, (n,), generator=gen)
    i = torch.arange(n)
    for k in range(12):
        img[i[y == 0], 0, r[y == 0], k] += 1.6
        img[i[y == 1], 0, k, r[y == 1]] += 1.6
        img[i[y == 2], 0, k, k] += 1.6
        img[i[y == 3], 0, k, 11 - k] += 1.6
    return img, y


class Gossip:
    def __init__(self, model, rank, world, every, seed):
        self.model, self.rank, self.world, self.every = model, rank, world, every
        self.gen = torch.Generator().manual_seed(seed)        # the matching must be the same on all ranks

    def peer(self):
        order = torch.randperm(self.world, generator=self.gen).tolist()
        at = order.index(self.rank)
        other = at ^ 1
        return order[other] if other < self.world else None

    def maybe_mix(self, step):
        if (step + 1) % self.every:
            return
        peer = self.peer()
        if peer is None:
            return
        mine = parameters_to_vector(self.model.parameters()).detach()
        theirs = torch.empty_like(mine)
        ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        vector_to_parameters(0.5 * (mine + theirs), self.model.parameters())

    def consensus(self):
        flat = parameters_to_vector(self.model.parameters()).detach().clone()
        spread = flat.clone()
        dist.all_reduce(flat)
        flat /= self.world
        spread = (spread - flat).norm() / flat.norm()
        vector_to_parameters(flat, self.model.parameters())
        return spread.item()


@torch.no_grad()
def test_accuracy(model, rank):
    model.eval()
    x, y = images(800, torch.Generator().manual_seed(10_000 + rank))
    stat = torch.stack([(model(x).argmax(1) == y).float().sum(), torch.tensor(800.0)])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=400)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--every", type=int, default=5)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = ConvNet()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    gossip = Gossip(model, rank, world, args.every, seed=6)
    gen = torch.Generator().manual_seed(60 + rank)
    for step in range(args.steps):
        x, y = images(args.batch, gen)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        gossip.maybe_mix(step)
        if step % 100 == 0:
            print(f"[rank {rank}] step {step} own loss {loss.item():.3f}", flush=True)

    spread = gossip.consensus()
    acc = test_accuracy(model, rank)
    if rank == 0:
        print(f"distance to the mean before the last averaging {spread:.2e}, accuracy {acc:.3f}")
        torch.save(model.state_dict(), "gossip.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
