"""Token tagging that is stopped in the middle (queue limit) and continued by a second job."""
import argparse
import json
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Brackets(Dataset):
    """For every token of a bracket string: the nesting depth, capped at three."""

    OPEN, CLOSE, OTHER = 0, 1, 2

    def __init__(self, size, seed, length=20, flip=0.0):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(size):
            depth, tokens, labels = 0, [], []
            for _ in range(length):
                choices = [self.OTHER, self.OPEN] + ([self.CLOSE] * 2 if depth else [])
                token = rng.choice(choices)
                depth += {self.OPEN: 1, self.CLOSE: -1}.get(token, 0)
                tokens.append(token)
                labels.append(min(depth, 3) if rng.random() >= flip else rng.randrange(4))
            self.rows.append((torch.tensor(tokens), torch.tensor(labels)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class TaggingNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(3, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, x):
        return self.mlp(self.lstm(self.embed(x))[0])


class CheckpointManager:
    """last.pt is for continuing, best.pt for deployment."""

    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank
        if rank == 0:
            os.makedirs(folder, exist_ok=True)
        dist.barrier()

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, state):
        if self.rank == 0:
            tmp = self.path(name + ".tmp")
            torch.save(state, tmp)
            os.replace(tmp, self.path(name))
        dist.barrier()

    def read(self, name):
        return torch.load(self.path(name), map_location="cpu")

    def exists(self, name):
        return os.path.exists(self.path(name))


class History:
    def __init__(self, path, rank):
        self.path, self.rank = path, rank

    def add(self, **row):
        if self.rank == 0:
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


class TaggingJob:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train_set = Brackets(480, seed=1, flip=0.1)
        self.valid_set = Brackets(100, seed=2)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=args.seed)
        self.loader = DataLoader(self.train_set, args.batch_size, sampler=self.sampler)
        torch.manual_seed(args.seed)
        self.model = DDP(TaggingNet())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=args.cycle)
        self.checkpoints = CheckpointManager(args.folder, self.rank)
        self.history = History(os.path.join(args.folder, "history.jsonl"), self.rank)
        self.epoch = 0
        self.best = 0.0

    def state_dict(self):
        return {
            "epoch": self.epoch,
            "best": self.best,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.best = state["best"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def resume(self):
        if self.checkpoints.exists("last.pt"):
            self.load_state_dict(self.checkpoints.read("last.pt"))
            if self.rank == 0:
                print(f"continuing with epoch {self.epoch}")
        dist.barrier()

    def train_epoch(self):
        self.model.train()
        self.sampler.set_epoch(self.epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for tokens, labels in self.loader:
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)], dtype=torch.float64)
        dist.all_reduce(total)
        self.scheduler.step()
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        hits = torch.zeros(2)
        for i in range(self.rank, len(self.valid_set), self.world):
            tokens, labels = self.valid_set[i]
            hits += torch.tensor([(self.model.module(tokens[None])[0].argmax(1) == labels).sum().item(), len(labels)])
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()

    def run(self, until):
        while self.epoch < until:
            lr = self.scheduler.get_last_lr()[0]
            loss, accuracy = self.train_epoch(), self.validate()
            self.epoch += 1
            improved = accuracy > self.best
            if improved:
                self.best = accuracy
                self.checkpoints.write("best.pt", {"model": self.model.module.state_dict(), "accuracy": accuracy, "epoch": self.epoch})
            self.checkpoints.write("last.pt", self.state_dict())
            self.history.add(epoch=self.epoch, lr=round(lr, 5), loss=round(loss, 4), accuracy=round(accuracy, 4), best=improved)


def export(args):
    """Reads the model that goes into production."""
    best = torch.load(os.path.join(args.folder, "best.pt"))
    net = TaggingNet()
    net.load_state_dict(best["model"])
    print(f"export: epoch {best['epoch']} with accuracy {best['accuracy']:.4f}")
    torch.save(net.state_dict(), os.path.join(args.folder, "export.pt"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--stop-after", type=int, default=4)
    p.add_argument("--cycle", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=24)
    p.add_argument("--lr", type=float, default=2e-2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--folder", default="tagging")
    args = p.parse_args()
    dist.init_process_group("gloo")
    first = TaggingJob(args)
    first.run(until=args.stop_after)
    del first
    second = TaggingJob(args)
    second.resume()
    second.run(until=args.epochs)
    if second.rank == 0:
        export(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
