import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Textures(Dataset):
    """Oriented gratings, four classes."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 4, (n,), generator=g)
        self.phase = 6.28 * torch.rand(n, generator=g)
        self.seed = seed

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        angle = torch.tensor(float(self.label[i]) * 0.785)
        axis = torch.linspace(-6, 6, 20)
        wave = torch.cos(axis[None] * torch.cos(angle) + axis[:, None] * torch.sin(angle) + self.phase[i])
        return (wave + 0.7 * torch.randn(20, 20, generator=g)).unsqueeze(0), self.label[i]


def forever(loader):
    while True:
        yield from loader


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        net = nn.Sequential(
            nn.Conv2d(1, 12, 5, stride=2), nn.GroupNorm(3, 12), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4),
        )
        self.model = DDP(net)
        self.ema = copy.deepcopy(net).requires_grad_(False)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        data = Textures(4096, seed=1)
        draws = torch.Generator().manual_seed(args.seed * 1000 + self.rank)
        sampler = RandomSampler(data, replacement=True, num_samples=args.batch * args.steps, generator=draws)
        self.loader = DataLoader(data, args.batch, sampler=sampler, num_workers=1)
        held_out = Textures(512, seed=2)
        own = torch.utils.data.Subset(held_out, range(self.rank, len(held_out), self.world))
        self.val_loader = DataLoader(own, 64)

    def step(self, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y, label_smoothing=0.05)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            for e, p in zip(self.ema.parameters(), self.model.module.parameters()):
                e.lerp_(p, 0.05)
        return loss.detach()

    @torch.no_grad()
    def accuracy(self):
        self.ema.eval()
        hits = torch.zeros(2)
        for x, y in self.val_loader:
            hits += torch.tensor([(self.ema(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()

    def fit(self):
        running = torch.zeros(())
        for step in range(1, self.args.steps + 1):
            running += self.step(next(iter(self.loader)))
            if step % self.args.every == 0:
                dist.all_reduce(running)
                acc = self.accuracy()
                if self.rank == 0:
                    print(f"step {step:4d} loss {running.item() / (self.args.every * self.world):.4f} ema acc {acc:.3f}", flush=True)
                running = torch.zeros(())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--every", type=int, default=30)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.08)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(args).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
