"""Multi-label tagging of short messages, with a meter that joins its numbers over the processes when it is read."""
import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, TAGS, LENGTH = 300, 8, 16


class Messages(Dataset):
    """A tag holds when one of its twelve trigger words occurs."""

    def __init__(self, count, seed):
        gen = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (count, LENGTH), generator=gen)
        trigger = torch.arange(WORDS) // 12
        self.tags = torch.stack([(trigger[self.words] == tag).any(1) for tag in range(TAGS)], 1).float()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.tags[i]


class Tagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        self.net = nn.Sequential(nn.Linear(dim, 96), nn.ReLU(), nn.Linear(96, 48))
        self.out = nn.Linear(48, TAGS)

    def forward(self, words):
        return self.out(self.net(self.embed(words)).amax(1))


class Meter:
    def __init__(self, name):
        self.name = name
        self.clear()

    def clear(self):
        self.parts = torch.zeros(2, dtype=torch.float64)

    def add(self, value, count):
        self.parts += torch.tensor([float(value) * count, count], dtype=torch.float64)

    @property
    def mean(self):
        joined = self.parts.clone()
        dist.all_reduce(joined)
        return (joined[0] / joined[1]).item()

    def __str__(self):
        return f"{self.name} {self.mean:.4f}"


class Session:
    def __init__(self, args):
        self.args, self.main = args, dist.get_rank() == 0
        self.train_set, self.check_set = Messages(1280, 1), Messages(256, 2)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, drop_last=True)
        self.loader = DataLoader(self.train_set, args.batch, sampler=self.sampler, drop_last=True)
        self.check_loader = DataLoader(self.check_set, args.batch, sampler=DistributedSampler(self.check_set, shuffle=False))
        self.net = Tagger()
        self.model = DDP(self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.loss, self.exact = Meter("loss"), Meter("exact")

    def train(self, epoch):
        self.sampler.set_epoch(epoch)
        self.loss.clear()
        self.model.train()
        for words, tags in self.loader:
            loss = F.binary_cross_entropy_with_logits(self.model(words), tags)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.loss.add(loss.detach(), len(words))

    @torch.no_grad()
    def check(self):
        self.exact.clear()
        self.net.eval()
        for words, tags in self.check_loader:
            hit = ((self.net(words) > 0) == (tags > 0.5)).all(1).float().mean()
            self.exact.add(hit, len(words))

    def report(self, epoch):
        line = f"epoch {epoch}: {self.loss}, {self.exact}"
        if self.main:
            print(line, flush=True)

    def save(self, epoch):
        if self.main:
            torch.save({"epoch": epoch, "model": self.net.state_dict()}, self.args.out)
        dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--out", type=Path, default=Path("tagger.pt"))
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(9)
    session = Session(parser.parse_args())
    for epoch in range(session.args.epochs):
        session.train(epoch)
        session.check()
        session.report(epoch)
        session.save(epoch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
