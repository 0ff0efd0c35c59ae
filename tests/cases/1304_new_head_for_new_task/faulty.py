"""Transfer to a new label set: the body comes from an earlier task, the head is fresh."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TagNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


def tagged(n, classes, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    proto = torch.randn(classes, 16, generator=torch.Generator().manual_seed(classes))
    return TensorDataset(x, (x @ proto.t()).argmax(1))


class Printer:
    def __init__(self, rank):
        self.rank = rank

    def epoch_end(self, epoch, loss, acc):
        if self.rank == 0:
            print(f"epoch {epoch:2d}  loss {loss:.4f}  acc {100 * acc:.1f}%", flush=True)


def fit(model, opt, data, epochs, callbacks, batch_size=16):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        stat = torch.zeros(3, dtype=torch.float64)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stat += torch.tensor([loss.item() * len(y), (out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stat)
        for cb in callbacks:
            cb.epoch_end(epoch, (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--old-classes", type=int, default=9)
    ap.add_argument("--new-classes", type=int, default=5)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(13)

    net = TagNet(args.old_classes)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    if args.new_classes != args.old_classes:
        net.head = nn.Linear(net.head.in_features, args.new_classes)
    model = DDP(net)
    fit(model, opt, tagged(320, args.new_classes, seed=3), args.epochs, [Printer(rank)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
