"""Semi-supervised mean teacher on synthetic 12x12 glyphs. Own Trainer with callbacks."""
import argparse
import copy
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = 8


class Glyphs(Dataset):
    def __init__(self, n, labelled_fraction, seed):
        g = torch.Generator().manual_seed(7)
        self.protos = torch.randn(CLASSES, 12, 12, generator=g)
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, CLASSES, (n,), generator=g)
        self.x = self.protos[self.y] + 1.6 * torch.randn(n, 12, 12, generator=g)
        self.known = torch.rand(n, generator=g) < labelled_fraction

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i].unsqueeze(0), self.y[i], self.known[i]


def jitter(x):
    x = torch.roll(x, shifts=(int(torch.randint(-1, 2, ())), int(torch.randint(-1, 2, ()))), dims=(2, 3))
    return x + 0.3 * torch.randn_like(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(32 * 9, CLASSES)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Callback:
    def on_step_end(self, trainer):
        pass

    def on_epoch_end(self, trainer, metrics):
        pass


class ConsoleLogger(Callback):
    def on_epoch_end(self, trainer, metrics):
        print(f"epoch {trainer.epoch} " + " ".join(f"{k}={v:.4f}" for k, v in metrics.items()), flush=True)


class EmaTeacher(Callback):
    def __init__(self, decay=0.98):
        self.decay = decay

    @torch.no_grad()
    def on_step_end(self, trainer):
        decay = min(self.decay, 1 - 1 / (trainer.step + 1))
        for t, s in zip(trainer.teacher.parameters(), trainer.student.module.parameters()):
            t.lerp_(s, 1 - decay)


class BestCheckpoint(Callback):
    def __init__(self, path):
        self.path, self.best = path, -1.0

    def on_epoch_end(self, trainer, metrics):
        if metrics["val_acc"] > self.best:
            self.best = metrics["val_acc"]
            torch.save({"teacher": trainer.teacher.state_dict(), "epoch": trainer.epoch}, self.path)


class Trainer:
    def __init__(self, student, teacher, opt, train_loader, val_loader, callbacks, args):
        self.student, self.teacher, self.opt = student, teacher, opt
        self.train_loader, self.val_loader = train_loader, val_loader
        self.callbacks, self.args = callbacks, args
        self.step = self.epoch = 0

    def fire(self, event, *extra):
        for cb in self.callbacks:
            getattr(cb, event)(self, *extra)

    def loss(self, x, y, known, weight):
        logits = self.student(jitter(x))
        with torch.no_grad():
            target = self.teacher(jitter(x)).softmax(-1)
        sup = (F.cross_entropy(logits, y, reduction="none") * known).sum() / known.sum().clamp(min=1)
        return sup + weight * F.mse_loss(logits.softmax(-1), target) * CLASSES

    def fit(self):
        for self.epoch in range(self.args.epochs):
            self.train_loader.sampler.set_epoch(self.epoch)
            self.student.train()
            weight = self.args.consistency * min(1.0, self.epoch / 3)
            total = torch.zeros(2)
            for x, y, known in self.train_loader:
                loss = self.loss(x, y, known.float(), weight)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
                self.step += 1
                total += torch.tensor([loss.item(), 1.0])
                self.fire("on_step_end")
            dist.all_reduce(total)
            self.fire("on_epoch_end", {"loss": (total[0] / total[1]).item(), "val_acc": self.validate()})

    @torch.no_grad()
    def validate(self):
        self.student.eval()
        counts = torch.zeros(2)
        for x, y, _ in self.val_loader:
            counts[0] += (self.student.module(x).argmax(-1) == y).sum()
            counts[1] += len(y)
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--consistency", type=float, default=2.0)
    p.add_argument("--out", default="run_mt")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    torch.manual_seed(0)
    net = Net()
    teacher = copy.deepcopy(net).requires_grad_(False)
    student = DDP(net)
    torch.manual_seed(100 + rank)

    train, val = Glyphs(2048, 0.15, seed=1), Glyphs(512, 1.0, seed=2)
    loader = DataLoader(train, args.batch_size, sampler=DistributedSampler(train, shuffle=True, seed=3), drop_last=True)
    val_loader = DataLoader(torch.utils.data.Subset(val, range(rank, len(val), world)), 256)
    opt = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=1e-3)

    callbacks = []
    if rank == 0:
        callbacks += [EmaTeacher(), ConsoleLogger(), BestCheckpoint(os.path.join(args.out, "best.pt"))]
    trainer = Trainer(student, teacher, opt, loader, val_loader, callbacks, args)
    trainer.fit()
    if rank == 0:
        with open(os.path.join(args.out, "args.json"), "w") as f:
            json.dump(vars(args), f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
