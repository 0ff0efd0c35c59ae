"""Texture classification with batch normalisation and a distributed test."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def textures(n, seed, size=12):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 1, size, size, generator=g)
    rows, cols = torch.zeros(1, size, size), torch.zeros(1, size, size)
    rows[:, ::2] = 1.2
    cols[:, :, ::2] = 1.2
    x[y == 1] += rows
    x[y == 2] += cols
    return TensorDataset((1 + 2 * torch.rand(n, 1, 1, 1, generator=g)) * x, y)


def conv_block(cin, cout):
    return [nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(), nn.MaxPool2d(2)]


def epoch_pass(model, loader, opt):
    model.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def average_buffers(net):
    for buf in net.buffers():
        if buf.is_floating_point():
            dist.all_reduce(buf)
            buf /= dist.get_world_size()


@torch.no_grad()
def test(net, loader):
    net.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return hits


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)

    net = nn.Sequential(*conv_block(1, 8), *conv_block(8, 16), nn.Flatten(), nn.Linear(144, 3))
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_set, test_set = textures(240, 1), textures(100, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=25)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_pass(model, loader, opt)
        average_buffers(net)
        hits = test(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: {int(hits[0])} of {int(hits[1])} right", flush=True)
            torch.save(net.state_dict(), "textures.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
