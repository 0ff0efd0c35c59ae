"""Fine-tuning in two stages: first the new head, later the whole network."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Stripes(Dataset):
    def __init__(self, n=256, size=12):
        g = torch.Generator().manual_seed(40)
        self.kind = torch.randint(0, 3, (n,), generator=g)
        self.noise = 0.7 * torch.randn(n, 1, size, size, generator=g)
        line = (torch.arange(size) // 2 % 2).float()
        self.pattern = torch.stack([line.expand(size, size), line.unsqueeze(1).expand(size, size), torch.full((size, size), 0.5)])

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return self.pattern[self.kind[i]].unsqueeze(0) + self.noise[i], self.kind[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
        self.head = nn.Linear(108, 3)

    def forward(self, x):
        return self.head(self.body(x))


class FineTuner:
    def __init__(self, net, loader, sampler, rank):
        self.net, self.loader, self.sampler, self.rank = net, loader, sampler, rank
        self.epoch = 0
        self.net.body.requires_grad_(False)
        self.model = DDP(self.net)
        self.opt = torch.optim.SGD(self.net.head.parameters(), lr=0.1, momentum=0.9)
        self.sched = StepLR(self.opt, step_size=1, gamma=0.5)

    def unfreeze(self, lr):
        self.net.body.requires_grad_(True)
        self.model = DDP(self.net)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.sched = StepLR(self.opt, step_size=1, gamma=0.5)

    def run(self, epochs):
        for _ in range(epochs):
            self.sampler.set_epoch(self.epoch)
            total = torch.zeros(2)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += torch.tensor([loss.item() * len(y), len(y)])
            self.sched.step()
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {self.epoch}: loss {(total[0] / total[1]).item():.4f}", flush=True)
            self.epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--head-epochs", type=int, default=2)
    ap.add_argument("--full-epochs", type=int, default=4)
    ap.add_argument("--full-lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = Stripes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    tuner = FineTuner(Net(), loader, sampler, int(os.environ["RANK"]))
    tuner.run(args.head_epochs)
    tuner.unfreeze(args.full_lr)
    tuner.run(args.full_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
