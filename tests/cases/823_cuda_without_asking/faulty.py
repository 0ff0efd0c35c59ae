"""Sequence tagger, one process per device."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def brackets(n=192, length=10):
    """Depth of nesting at each position (clipped)."""
    g = torch.Generator().manual_seed(17)
    token = torch.randint(0, 2, (n, length), generator=g)
    depth = (1 - 2 * token).cumsum(1).clamp(-3, 3) + 3
    return TensorDataset(token, depth)


class Tagger(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(2, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, 7)

    def forward(self, token):
        return self.out(self.rnn(self.embed(token))[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.manual_seed(0)
    model = DDP(Tagger().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = brackets()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for token, depth in loader:
            token, depth = token.to(device), depth.to(device)
            loss = nn.functional.cross_entropy(model(token).flatten(0, 1), depth.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
