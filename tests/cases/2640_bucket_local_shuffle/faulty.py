"""Utterance classification with a GRU, length-bucketed batches, DDP."""
import argparse
import os
import random
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

N_CLASS, N_MEL = 8, 10


class Utterances(Dataset):
    def __init__(self, n, seed, noise=0.0):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(N_CLASS, 3, N_MEL, generator=torch.Generator().manual_seed(4))
        self.noise = noise
        self.items = []
        for _ in range(n):
            y = int(torch.randint(N_CLASS, (1,), generator=g))
            length = int(torch.randint(9, 40, (1,), generator=g))
            seg = (torch.arange(length) * 3 // length)
            self.items.append((proto[y][seg] + 1.8 * torch.randn(length, N_MEL, generator=g), y))

    def __len__(self):
        return len(self.items)

    def lengths(self):
        return [len(x) for x, _ in self.items]

    def __getitem__(self, i):
        x, y = self.items[i]
        if self.noise:
            lo = random.randrange(len(x) - 3)
            x = x.clone()
            x[lo:lo + 3] *= random.uniform(0, 1)
            x += self.noise * torch.randn_like(x)
        return x, y


def collate(rows):
    xs, ys = zip(*rows)
    return pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.tensor(ys)


class BucketBatches(Sampler):
    """Batches of similar length; within a bucket every process takes its own stride of the order."""

    def __init__(self, lengths, batch, edges, rank, world, seed):
        self.buckets = defaultdict(list)
        for i, n in enumerate(lengths):
            self.buckets[sum(n > e for e in edges)].append(i)
        self.batch, self.rank, self.world, self.seed, self.epoch = batch, rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return sum(len(v) // (self.batch * self.world) for v in self.buckets.values())

    def __iter__(self):
        shared = random.Random(self.seed * 1000 + self.epoch)
        plan = []
        for key in sorted(self.buckets):
            ids = list(self.buckets[key])
            random.shuffle(ids)
            usable = len(ids) // (self.batch * self.world) * self.batch * self.world
            own = ids[:usable][self.rank::self.world]
            plan += [own[k:k + self.batch] for k in range(0, len(own), self.batch)]
        shared.shuffle(plan)
        yield from plan


class SpeechNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(N_MEL, 40, batch_first=True, bidirectional=True)
        self.head = nn.Linear(80, N_CLASS)

    def forward(self, x, lens):
        out, _ = self.rnn(x)
        mask = (torch.arange(x.shape[1])[None] < lens[:, None]).unsqueeze(2)
        return self.head((out * mask).sum(1) / lens[:, None])


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    x, lens, y = collate([data[i] for i in range(rank, len(data), world)])
    logit = model(x, lens)
    stat = torch.tensor([F.cross_entropy(logit, y, reduction="sum"), (logit.argmax(1) == y).float().sum(), float(len(y))])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(SpeechNet())
    torch.manual_seed(args.seed + 1 + rank)
    random.seed(args.seed + 1 + rank)
    train, valid = Utterances(1200, 100, noise=0.1), Utterances(600, 200)
    sampler = BucketBatches(train.lengths(), args.batch, (16, 24, 32), rank, world, args.seed)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tally = torch.zeros(2)
        for x, lens, y in loader:
            loss = F.cross_entropy(model(x, lens), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            tally += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(tally)
        vloss, vacc = evaluate(model.module, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch} train {(tally[0] / tally[1]).item():.4f} on {int(tally[1])} utterances, "
                  f"valid {vloss:.4f} acc {vacc:.3f}", flush=True)
    if rank == 0:
        os.makedirs("speech", exist_ok=True)
        torch.save(model.module.state_dict(), "speech/gru.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
