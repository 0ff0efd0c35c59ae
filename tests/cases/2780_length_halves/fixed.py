import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Traces(Dataset):
    """Event traces of very different lengths; the label says which of two rates made the trace."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.lengths = (12 + 180 * torch.rand(n, generator=g) ** 2).long()
        self.labels = torch.randint(0, 2, (n,), generator=g)
        decay = torch.where(self.labels == 1, 0.35, 0.75)
        noise = torch.randn(n, int(self.lengths.max()), generator=g)
        x = torch.zeros_like(noise)
        for t in range(1, noise.shape[1]):
            x[:, t] = decay * x[:, t - 1] + noise[:, t]
        self.traces = [row[:length].clone() for row, length in zip(x, self.lengths.tolist())]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.traces[i], self.labels[i]


def collate(items):
    xs, ys = zip(*items)
    lengths = torch.tensor([len(x) for x in xs])
    return pad_sequence(xs, batch_first=True).unsqueeze(-1), lengths, torch.stack(ys)


class BucketBatches(Sampler):
    """Batches of traces of like length, so that little is spent on padding."""

    def __init__(self, lengths, batch, rank, world, seed=0):
        order = sorted(range(len(lengths)), key=lambda i: int(lengths[i]))
        per_rank = len(order) // world // batch * batch
        mine = order[rank:per_rank * world:world]
        self.batches = [mine[i:i + batch] for i in range(0, per_rank, batch)]
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for j in torch.randperm(len(self.batches), generator=g).tolist():
            yield self.batches[j]

    def __len__(self):
        return len(self.batches)


class TraceNet(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.inp = nn.Linear(1, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.out = nn.Linear(hidden, 2)
        self.hidden = hidden

    def forward(self, x, lengths):
        h = x.new_zeros(x.shape[0], self.hidden)
        seq = self.inp(x)
        for t in range(x.shape[1]):
            live = (t < lengths).unsqueeze(1)
            h = torch.where(live, self.cell(seq[:, t], h), h)
        return self.out(h)


@torch.no_grad()
def test_accuracy(net, data, rank, world):
    net.eval()
    hits = torch.zeros(2)
    for start in range(rank * 32, len(data), world * 32):
        x, lengths, y = collate([data[i] for i in range(start, min(start + 32, len(data)))])
        hits += torch.tensor([(net(x, lengths).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = Traces(1280, 1), Traces(256, 2)
    torch.manual_seed(6)
    model = DDP(TraceNet())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = BucketBatches(train.lengths, args.batch, rank, world, seed=8)
    loader = DataLoader(train, batch_sampler=batches, collate_fn=collate)

    for epoch in range(args.epochs):
        batches.set_epoch(epoch)
        model.train()
        began = time.perf_counter()
        sums = torch.zeros(2)
        for x, lengths, y in loader:
            loss = nn.functional.cross_entropy(model(x, lengths), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sums += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(sums)
        took = time.perf_counter() - began
        acc = test_accuracy(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0] / sums[1]:.4f} acc {acc:.3f} {took:.1f}s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
