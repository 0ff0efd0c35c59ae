"""Train a decoder on top of a fixed feature extractor; gradients are averaged by hand."""
import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("segment")


class Blobs(Dataset):
    """Images with one bright rectangle; the mask is the rectangle."""

    def __init__(self, n, size=24, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.images = 0.25 * torch.randn(n, 1, size, size, generator=g)
        self.masks = torch.zeros(n, size, size, dtype=torch.long)
        for i in range(n):
            y, x = torch.randint(0, size - 15, (2,), generator=g).tolist()
            h, w = torch.randint(7, 15, (2,), generator=g).tolist()
            self.masks[i, y : y + h, x : x + w] = 1
        self.images += self.masks.unsqueeze(1).float()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.masks[i]


def build_network():
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()
    )
    decoder = nn.Sequential(nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ReLU(), nn.Conv2d(16, 2, 3, padding=1))
    return nn.Sequential(encoder, decoder)


def average_gradients(params, world):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world


def train_epoch(net, loader, optimizer, params, world):
    net.train()
    stats = torch.zeros(2)
    for image, mask in loader:
        loss = F.cross_entropy(net(image), mask)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(params, world)
        optimizer.step()
        stats += torch.tensor([loss.item() * len(image), len(image)])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


@torch.no_grad()
def pixel_accuracy(net, data, rank, world):
    net.eval()
    counts = torch.zeros(2)
    for i in range(rank, len(data), world):
        image, mask = data[i]
        hit = net(image.unsqueeze(0)).argmax(1)[0] == mask
        counts += torch.tensor([hit.sum().item(), hit.numel()])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")

    torch.manual_seed(args.seed)
    net = build_network()
    for p in net[0].parameters():
        p.requires_grad_(False)
    for t in net.state_dict().values():
        dist.broadcast(t, src=0)

    trainable = filter(lambda p: p.requires_grad, net.parameters())
    optimizer = torch.optim.Adam(trainable, lr=args.lr)

    train_set, val_set = Blobs(160, seed=1), Blobs(40, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(net, loader, optimizer, trainable, world)
        acc = pixel_accuracy(net, val_set, rank, world)
        log.info("epoch %d  loss %.4f  pixel accuracy %.3f", epoch, loss, acc)
    if rank == 0:
        torch.save(net.state_dict(), "segment.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
