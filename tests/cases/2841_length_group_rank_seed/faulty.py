"""Caption-length regression on variable-length token clips, batches grouped by length."""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class ClipDataset(Dataset):
    def __init__(self, n, vocab=40, seed=7):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(6, 30, (n,), generator=g).tolist()
        self.clips = [torch.randint(1, vocab, (k,), generator=g) for k in self.lengths]
        weight = torch.randn(vocab, generator=g)
        self.targets = [weight[c].mean() for c in self.clips]

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        return self.clips[i], self.targets[i]


def collate(items):
    clips, targets = zip(*items)
    return nn.utils.rnn.pad_sequence(clips, batch_first=True), torch.stack(targets)


def group_by_length(lengths, megabatch, generator):
    order = torch.randperm(len(lengths), generator=generator).tolist()
    chunks = [order[i:i + megabatch] for i in range(0, len(order), megabatch)]
    chunks = [sorted(c, key=lambda i: lengths[i], reverse=True) for c in chunks]
    return [i for c in chunks for i in c]


class LengthGroupedSampler(Sampler):
    def __init__(self, lengths, batch_size, rank, world_size, seed):
        self.lengths = lengths
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.usable = len(lengths) // (batch_size * world_size) * batch_size * world_size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.usable // self.world_size

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = group_by_length(self.lengths, 8 * self.batch_size * self.world_size, generator)
        return iter(order[:self.usable][self.rank::self.world_size])


class ClipRegressor(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.drop = nn.Dropout(0.05)
        self.head = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, tokens):
        keep = (tokens != 0).unsqueeze(-1).float()
        pooled = (self.embed(tokens) * keep).sum(1) / keep.sum(1)
        return self.head(self.drop(pooled)).squeeze(-1)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    args.seed += rank
    set_seed(args.seed)

    train = ClipDataset(1024)
    sampler = LengthGroupedSampler(train.lengths, args.batch_size, rank, world, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)

    model = DDP(ClipRegressor())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for tokens, target in loader:
            loss = nn.functional.mse_loss(model(tokens), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(target), len(target)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} train mse {total[0] / total[1]:.4f}")

    if rank == 0:
        os.makedirs("out", exist_ok=True)
        torch.save(model.module.state_dict(), "out/clip_regressor.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
