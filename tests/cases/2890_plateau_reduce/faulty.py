"""Sequence tagging with ReduceLROnPlateau, early stopping and small metric classes."""
import argparse
import copy
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tagging(n, length, vocab, tags, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (n, length), generator=g)
    left = torch.roll(ids, 1, dims=1)
    left[:, 0] = 0
    labels = (ids + 2 * left) % tags
    flip = torch.rand(n, length, generator=g) < 0.05
    labels[flip] = torch.randint(tags, (int(flip.sum()),), generator=g)
    return TensorDataset(ids, labels)


class Average:
    def __init__(self):
        self.acc = torch.zeros(2, dtype=torch.float64)

    def add(self, value, weight):
        self.acc += torch.tensor([value * weight, weight], dtype=torch.float64)

    def sync(self):
        dist.reduce(self.acc, dst=0)
        return self

    @property
    def value(self):
        return (self.acc[0] / self.acc[1]).item()


class EarlyStop:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad, self.weights = float("inf"), 0, None

    def update(self, value, model):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
            self.weights = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


class Tagger(nn.Module):
    def __init__(self, vocab, tags, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, 64, 3, padding=1)
        self.rnn = nn.GRU(64, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, tags)

    def forward(self, ids):
        h = torch.relu(self.conv(self.emb(ids).transpose(1, 2))).transpose(1, 2)
        return self.out(self.rnn(h)[0])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=14)
    p.add_argument("--lr", type=float, default=3e-2)
    p.add_argument("--vocab", type=int, default=30)
    p.add_argument("--tags", type=int, default=4)
    p.add_argument("--patience", type=int, default=8)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = logging.getLogger("tagger")
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    torch.manual_seed(2)

    train = tagging(768, 16, args.vocab, args.tags, 1)
    valid = tagging(192, 16, args.vocab, args.tags, 2)
    sampler = DistributedSampler(train, seed=3)
    train_loader = DataLoader(train, batch_size=24, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=48, sampler=DistributedSampler(valid, shuffle=False))

    model = DDP(Tagger(args.vocab, args.tags))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    plateau = ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=2e-2)
    stopper = EarlyStop(args.patience, 1e-4)
    crit = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        train_loss = Average()
        for ids, labels in train_loader:
            loss = crit(model(ids).flatten(0, 1), labels.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            train_loss.add(loss.item(), labels.numel())
        model.eval()
        val_loss, val_acc = Average(), Average()
        with torch.no_grad():
            for ids, labels in valid_loader:
                logits = model.module(ids)
                val_loss.add(crit(logits.flatten(0, 1), labels.flatten()).item(), labels.numel())
                val_acc.add((logits.argmax(-1) == labels).float().mean().item(), labels.numel())
        for m in (train_loss, val_loss, val_acc):
            m.sync()
        plateau.step(val_loss.value)
        log.info("epoch %d train %.4f val %.4f acc %.3f lr %.5f", epoch, train_loss.value, val_loss.value,
                 val_acc.value, opt.param_groups[0]["lr"])
        stop = torch.tensor([int(stopper.update(val_loss.value, model.module))])
        dist.broadcast(stop, src=0)
        if stop.item():
            log.info("no progress for %d epochs", args.patience)
            break
    if rank == 0:
        torch.save({"model": stopper.weights, "best": stopper.best}, "tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
