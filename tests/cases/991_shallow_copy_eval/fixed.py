"""Image model with an evaluation snapshot after each epoch."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SmallNet(nn.Module):
    def __init__(self, width=12, classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, bias=False)
        self.norm1 = nn.GroupNorm(3, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, bias=False)
        self.norm2 = nn.GroupNorm(3, width)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(width * 4, classes)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        x = nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)
        return self.fc(self.drop(x))


def snapshot(net):
    """An independent copy in inference mode; the training network must not be touched."""
    return copy.deepcopy(net).eval()


def quadrant_data(n, seed):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=gen)
    x = 0.8 * torch.randn(n, 1, 10, 10, generator=gen)
    for i, q in enumerate(y.tolist()):
        x[i, 0, 5 * (q // 2) : 5 * (q // 2) + 5, 5 * (q % 2) : 5 * (q % 2) + 5] += 0.8
    return TensorDataset(x, y)


class Validator:
    def __init__(self, data, rank, world):
        self.x, self.y = data[rank::world]

    @torch.no_grad()
    def __call__(self, net):
        frozen = snapshot(net)
        hits = (frozen(self.x).argmax(1) == self.y).sum()
        counts = torch.tensor([hits.item(), len(self.y)], dtype=torch.float64)
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(5)
    model = DDP(SmallNet())
    torch.manual_seed(500 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    train = quadrant_data(400, 1)
    validator = Validator(quadrant_data(120, 2), rank, world)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        accuracy = validator(model.module)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
