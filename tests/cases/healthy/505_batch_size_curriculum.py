"""Curriculum: short sequences in big batches first, then longer ones in smaller batches."""
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Stage(NamedTuple):
    length: int
    batch: int
    epochs: int


STAGES = [Stage(6, 32, 2), Stage(12, 16, 2), Stage(24, 8, 1)]


class Parity(Dataset):
    """running parity of the last three bits"""

    def __init__(self, length, n=384):
        g = torch.Generator().manual_seed(length)
        self.bits = torch.randint(0, 2, (n, length), generator=g)
        padded = torch.cat([torch.zeros(n, 2, dtype=torch.long), self.bits], 1)
        self.target = (padded[:, 2:] + padded[:, 1:-1] + padded[:, :-2]) % 2

    def __len__(self):
        return len(self.bits)

    def __getitem__(self, i):
        return self.bits[i], self.target[i]


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(2, 8), nn.GRU(8, width, batch_first=True), nn.Linear(width, 2)

    def forward(self, bits):
        return self.out(self.rnn(self.emb(bits))[0])


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    epoch = 0
    for stage in STAGES:
        data = Parity(stage.length)
        sampler = DistributedSampler(data, shuffle=True, seed=9, drop_last=True)
        loader = DataLoader(data, batch_size=stage.batch, sampler=sampler)
        for group in opt.param_groups:
            group["lr"] = 2e-2 * (stage.batch / 32) ** 0.5
        for _ in range(stage.epochs):
            sampler.set_epoch(epoch)
            stats = torch.zeros(3)
            for bits, target in loader:
                logits = model(bits)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
                opt.zero_grad()
                loss.backward()
                opt.step()
                stats += torch.tensor([loss.item() * target.numel(), (logits.argmax(-1) == target).sum().item(), target.numel()])
            dist.all_reduce(stats)
            if rank == 0:
                print(f"epoch {epoch} length {stage.length} loss {stats[0] / stats[2]:.4f} accuracy {stats[1] / stats[2]:.3f}")
            epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
