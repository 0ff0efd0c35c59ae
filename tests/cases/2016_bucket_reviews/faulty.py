"""Sentiment of synthetic reviews; a data module builds the loaders, a generic fit() runs them."""
import argparse
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler

VOCAB = 200


class Reviews(Dataset):
    """Token 0 is padding; 1-20 praise, 21-40 complain, the rest is filler."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(8, 40, (1,), generator=g))
            good = int(torch.randint(0, 2, (1,), generator=g))
            ids = torch.randint(41, VOCAB, (length,), generator=g)
            told = torch.randint(0, length, (3,), generator=g)
            ids[told] = torch.randint(1, 21, (3,), generator=g) + 20 * (1 - good)
            self.items.append((ids, good))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(rows):
    ids, labels = zip(*rows)
    return pad_sequence(ids, batch_first=True), torch.tensor(labels)


class ReviewData:
    def __init__(self, batch):
        self.batch = batch
        self.train, self.test = Reviews(640, 1), Reviews(160, 2)

    def loader(self, data, sampler, drop_last=False):
        batches = BatchSampler(sampler, self.batch, drop_last)
        return DataLoader(data, batch_sampler=batches, collate_fn=collate)

    def train_loader(self):
        return self.loader(self.train, DistributedSampler(self.train, shuffle=True), drop_last=True)

    def test_loader(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        part = torch.utils.data.Subset(self.test, range(rank, len(self.test), world))
        return self.loader(part, SequentialSampler(part))


class Reader(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d, padding_idx=0)
        self.attend = nn.Linear(d, 1)
        self.out = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, ids):
        x = self.embed(ids)
        weight = self.attend(x).squeeze(-1).masked_fill(ids == 0, float("-inf")).softmax(1)
        return self.out((weight.unsqueeze(-1) * x).sum(1))


def start_epoch(loader, epoch):
    sampler = loader.sampler
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def fit(model, opt, train, test, epochs):
    recent = deque(maxlen=len(train))
    for epoch in range(epochs):
        start_epoch(train, epoch)
        model.train()
        for ids, labels in train:
            loss = nn.functional.cross_entropy(model(ids), labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            recent.append(loss.detach())
        yield epoch, torch.stack(list(recent)).mean(), accuracy(model.module, test)


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    count = torch.zeros(2)
    for ids, labels in loader:
        count += torch.tensor([(net(ids).argmax(1) == labels).sum().item(), len(labels)])
    dist.all_reduce(count)
    return (count[0] / count[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(19)
    data = ReviewData(args.batch)
    model = DDP(Reader())
    torch.manual_seed(500 + dist.get_rank())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch, loss, score in fit(model, opt, data.train_loader(), data.test_loader(), args.epochs):
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item() / dist.get_world_size():.4f}, test accuracy {score:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
