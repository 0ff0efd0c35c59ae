"""Translation-like sequence model (reverses sequences) with teacher forcing."""
import os
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

Args = namedtuple("Args", "epochs batch lr width length symbols")
ARGS = Args(epochs=2, batch=16, lr=2e-3, width=48, length=10, symbols=12)


class Seq2Seq(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.src = nn.Embedding(a.symbols, a.width)
        self.tgt = nn.Embedding(a.symbols + 1, a.width)
        self.enc = nn.GRU(a.width, a.width, batch_first=True)
        self.dec = nn.GRU(a.width, a.width, batch_first=True)
        self.out = nn.Linear(2 * a.width, a.symbols)

    def forward(self, src, shifted):
        memory, last = self.enc(self.src(src))
        states, _ = self.dec(self.tgt(shifted), last)
        weights = (states @ memory.transpose(1, 2) / states.shape[-1] ** 0.5).softmax(-1)
        return self.out(torch.cat([states, weights @ memory], -1))


def sequences(a, n, seed):
    gen = torch.Generator().manual_seed(seed)
    src = torch.randint(0, a.symbols, (n, a.length), generator=gen)
    tgt = src.flip(1)
    shifted = torch.cat([torch.full((n, 1), a.symbols), tgt[:, :-1]], 1)
    return TensorDataset(src, shifted, tgt)


def nll(model, batch):
    src, shifted, tgt = batch
    return F.cross_entropy(model(src, shifted).flatten(0, 1), tgt.flatten())


def validation_loss(model, loader):
    model.eval()
    total, batches = 0.0, 0
    with torch.no_grad():
        for batch in loader:
            total = total + nll(model, batch)
            batches += 1
    model.train()
    mean = torch.tensor(float(total) / batches)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main(a):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(88)
    model = DDP(Seq2Seq(a))
    optimizer = torch.optim.Adam(model.parameters(), lr=a.lr)
    train, val = sequences(a, 960, 1), sequences(a, 1280, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=a.batch, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=a.batch)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            nll(model, batch).backward()
            optimizer.step()
        value = validation_loss(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation nll {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(ARGS)
