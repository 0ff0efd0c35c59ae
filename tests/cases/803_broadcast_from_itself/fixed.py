"""Character-frequency autoencoder with synchronous SGD written by hand."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def histograms(n=240, letters=26):
    g = torch.Generator().manual_seed(8)
    topics = torch.rand(5, letters, generator=g)
    mix = torch.rand(n, 5, generator=g).softmax(1)
    return TensorDataset((mix @ topics) / topics.sum(1).mean())


class AutoEncoder(nn.Module):
    def __init__(self, letters=26, code=5):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(letters, 16), nn.ReLU(), nn.Linear(16, code))
        self.decode = nn.Sequential(nn.Linear(code, 16), nn.ReLU(), nn.Linear(16, letters))

    def forward(self, x):
        return self.decode(self.encode(x))


def synchronise(model, rank):
    """All processes start with the same weights."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=0.5)
    args = ap.parse_args()

    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(1000 + rank)

    model = AutoEncoder()
    synchronise(model, rank)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = histograms()
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=15, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(1)
        for (x,) in loader:
            opt.zero_grad()
            loss = (model(x) - x).pow(2).mean()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(world)
            opt.step()
            meter += loss.detach() / len(loader)
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: reconstruction {meter.item() / world:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
