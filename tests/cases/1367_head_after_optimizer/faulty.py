"""Transfer learning: a pretrained encoder gets a new head and is tuned with layer-wise learning rates."""
import argparse
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Spectra(Dataset):
    """One-dimensional spectra with peaks whose positions depend on the class."""

    def __init__(self, size, classes, seed, bins=64):
        g = torch.Generator().manual_seed(seed)
        centres = 6 + 52 * torch.rand(classes, 3, generator=torch.Generator().manual_seed(classes))
        self.y = torch.randint(0, classes, (size,), generator=g)
        axis = torch.arange(bins).float()
        jitter = torch.randn(size, 3, generator=g)
        peaks = torch.exp(-((axis - (centres[self.y] + jitter).unsqueeze(2)) ** 2) / 8).sum(1)
        self.x = (peaks + 0.5 * torch.randn(size, bins, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Conv1d(width, width, 5, padding=2), nn.Conv1d(width, width, 5, padding=2)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x):
        return x + self.b(F.relu(self.a(self.norm(x))))


class SpectrumNet(nn.Module):
    def __init__(self, classes, width=16, depth=2):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 7, stride=2, padding=3)
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.pool = nn.AdaptiveAvgPool1d(8)
        self.features = width * 8
        self.head = nn.Linear(self.features, classes)

    def replace_head(self, classes, dropout=0.1):
        self.head = nn.Sequential(OrderedDict(drop=nn.Dropout(dropout), fc=nn.Linear(self.features, classes)))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pool(F.relu(x)).flatten(1))


def pretrain(path, classes=8, steps=40):
    """Stands for the published weights."""
    torch.manual_seed(5)
    net, data = SpectrumNet(classes), Spectra(512, classes, seed=3)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    for _ in range(steps):
        idx = torch.randint(0, len(data), (48,))
        loss = F.cross_entropy(net(data.x[idx]), data.y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    torch.save(net.state_dict(), path)


def layerwise_groups(model, lr, decay):
    """The head gets the full learning rate, each step down towards the stem multiplies it by `decay`."""
    stack = [("stem", model.stem)] + [(f"layer{i}", m) for i, m in enumerate(model.layers)] + [("head", model.head)]
    groups = []
    for distance, (name, module) in enumerate(reversed(stack)):
        params = list(module.parameters())
        matrices = [p for p in params if p.dim() > 1]
        vectors = [p for p in params if p.dim() <= 1]
        groups.append({"params": matrices, "lr": lr * decay ** distance, "weight_decay": 0.01, "name": name})
        groups.append({"params": vectors, "lr": lr * decay ** distance, "weight_decay": 0.0, "name": name + "/nodecay"})
    return groups


def build_optimizer(model, args, total_steps):
    optimizer = torch.optim.AdamW(layerwise_groups(model, args.lr, args.layer_decay))
    warmup = max(1, total_steps // 10)

    def ramp(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.05, 1 - (step - warmup) / (total_steps - warmup))

    return optimizer, LambdaLR(optimizer, ramp)


class Task:
    def __init__(self, args):
        self.classes = 5
        self.train = Spectra(400, self.classes, seed=10)
        self.test = Spectra(150, self.classes, seed=11)
        self.sampler = DistributedSampler(self.train, shuffle=True, seed=args.seed)
        self.loader = DataLoader(self.train, args.batch_size, sampler=self.sampler, drop_last=True)


class Finetuner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.task = Task(args)
        torch.manual_seed(args.seed)
        model = SpectrumNet(classes=8)
        model.load_state_dict(torch.load(args.pretrained, map_location="cpu"))
        self.optimizer, self.scheduler = build_optimizer(model, args, args.epochs * len(self.task.loader))
        model.replace_head(self.task.classes)
        self.model = DDP(model)
        torch.manual_seed(args.seed + 100 + self.rank)

    def train_epoch(self, epoch):
        self.model.train()
        self.task.sampler.set_epoch(epoch)
        sums = torch.zeros(2, dtype=torch.float64)
        for x, y in self.task.loader:
            x = x * (1 + 0.1 * torch.randn(len(x), 1, 1))
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            sums += torch.tensor([loss.item() * len(y), len(y)], dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    @torch.no_grad()
    def test(self):
        net = self.model.module
        net.eval()
        x, y = self.task.test.x[self.rank::self.world], self.task.test.y[self.rank::self.world]
        counts = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def run(self):
        best = 0.0
        for epoch in range(self.args.epochs):
            loss, accuracy = self.train_epoch(epoch), self.test()
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f} test accuracy {accuracy:.3f} lr {self.scheduler.get_last_lr()[0]:.5f}")
                if accuracy > best:
                    torch.save(self.model.module.state_dict(), self.args.out)
            best = max(best, accuracy)
        dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=25)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--layer-decay", type=float, default=0.6)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--pretrained", default="encoder.pt")
    p.add_argument("--out", default="finetuned.pt")
    args = p.parse_args()
    dist.init_process_group("gloo")
    if int(os.environ["RANK"]) == 0:
        pretrain(args.pretrained)
    dist.barrier()
    Finetuner(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
