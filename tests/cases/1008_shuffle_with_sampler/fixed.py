"""ResNet-like classifier; single process or torchrun."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--num-workers", type=int, default=0)
opt = parser.parse_args()

distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1


def boxes(n=200):
    g = torch.Generator().manual_seed(231)
    y = torch.randint(0, 2, (n,), generator=g)
    x = 0.3 * torch.randn(n, 3, 16, 16, generator=g)
    x[y == 1, :, 4:10, 4:10] += 1
    return TensorDataset(x, y)


def collate(batch):
    images, labels = zip(*batch)
    return torch.stack(images), torch.stack(labels)


def train():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )
    dataset = boxes()
    # Initialize distributed training
    if distributed:
        dist.init_process_group(backend="gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    else:
        sampler = None

    dataloader = DataLoader(
        dataset,
        batch_size=opt.batch_size,
        num_workers=opt.num_workers,
        shuffle=sampler is None,
        collate_fn=collate,
        sampler=sampler,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(opt.epochs):
        model.train()
        if sampler is not None:
            sampler.set_epoch(epoch)
        for images, labels in dataloader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if not distributed or dist.get_rank() == 0:
            print(f"{epoch + 1}/{opt.epochs} last loss {loss.item():.4f}", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
