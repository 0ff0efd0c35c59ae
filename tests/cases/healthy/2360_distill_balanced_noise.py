"""Teacher trained on rank 0 and broadcast; student distilled data-parallel on rebalanced, noisily labelled data."""
import argparse
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

CLASSES, DIM = 4, 16
SHARES = [0.7, 0.15, 0.1, 0.05]


def draw(n, seed, balanced=False):
    g = torch.Generator().manual_seed(seed)
    p = torch.full((CLASSES,), 1 / CLASSES) if balanced else torch.tensor(SHARES)
    y = torch.multinomial(p, n, replacement=True, generator=g)
    proto = torch.randn(CLASSES, 2, DIM, generator=torch.Generator().manual_seed(77))
    mode = torch.randint(2, (n,), generator=g)
    return proto[y, mode] + 0.9 * torch.randn(n, DIM, generator=g), y


class NoisyLabels(Dataset):
    """Flips a share of the labels at random on purpose; drawn anew per epoch, the same on all ranks."""

    def __init__(self, x, y, rate, seed):
        self.x, self.y, self.rate, self.seed = x, y, rate, seed
        self.shown = y

    def set_epoch(self, epoch):
        g = torch.Generator().manual_seed(self.seed + epoch)
        flip = torch.rand(len(self.y), generator=g) < self.rate
        other = torch.randint(CLASSES, self.y.shape, generator=g)
        self.shown = torch.where(flip, other, self.y)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.shown[i]


class BalancedSampler(Sampler):
    """Draws with replacement so that all classes are equally likely, then deals the draw out to the ranks."""

    def __init__(self, labels, n, rank, world, seed):
        count = Counter(labels.tolist())
        self.weights = torch.tensor([1.0 / count[int(c)] for c in labels], dtype=torch.double)
        self.n, self.rank, self.world, self.seed, self.epoch = n, rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.multinomial(self.weights, self.n, replacement=True, generator=g)
        return iter(order[self.rank:len(self) * self.world:self.world].tolist())


def mlp(width):
    return nn.Sequential(nn.Linear(DIM, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))


def train_teacher(net, x, y, epochs=12):
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    w = 1.0 / torch.tensor(SHARES)
    g = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=g).split(128):
            opt.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows], weight=w / w.mean()).backward()
            opt.step()


def distill_loss(student, teacher, labels, temp, alpha):
    soft = F.kl_div(F.log_softmax(student / temp, 1), F.softmax(teacher / temp, 1), reduction="batchmean") * temp ** 2
    return alpha * soft + (1 - alpha) * F.cross_entropy(student, labels)


@torch.no_grad()
def balanced_accuracy(net, rank, n=1200):
    net.eval()
    x, y = draw(n, seed=900 + rank, balanced=True)
    stat = torch.stack([(net(x).argmax(1) == y).float().sum(), torch.tensor(float(n))])
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--temp", type=float, default=3.0)
    ap.add_argument("--alpha", type=float, default=0.8)
    ap.add_argument("--noise", type=float, default=0.2)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = draw(5000, seed=1)
    torch.manual_seed(rank)
    teacher = mlp(128)
    if rank == 0:
        train_teacher(teacher, x, y)
    for p in teacher.parameters():
        dist.broadcast(p.data, src=0)
    teacher.eval().requires_grad_(False)

    student = DDP(mlp(24))
    data = NoisyLabels(x, y, args.noise, seed=5)
    sampler = BalancedSampler(y, len(y), rank, world, seed=3)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        data.set_epoch(epoch)
        student.train()
        seen = torch.zeros(2)
        for xb, yb in loader:
            with torch.no_grad():
                guide = teacher(xb)
            loss = distill_loss(student(xb), guide, yb, args.temp, args.alpha)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        sched.step()
        dist.all_reduce(seen)
        acc = balanced_accuracy(student.module, rank)
        if rank == 0:
            print(f"epoch {epoch} loss {seen[0] / seen[1]:.4f} balanced accuracy {acc:.3f}", flush=True)
    best = balanced_accuracy(teacher, rank)
    if rank == 0:
        print(f"teacher {best:.3f}, student {acc:.3f}")
        torch.save(student.module.state_dict(), "student.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
