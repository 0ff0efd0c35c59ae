"""Small conv net in channels_last with hand-written gradient averaging."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    grid = torch.arange(16.0)
    stripes = torch.stack([
        torch.sin(grid).view(16, 1).expand(16, 16),
        torch.sin(grid).view(1, 16).expand(16, 16),
        torch.sin(grid.view(16, 1) + grid.view(1, 16)),
    ])
    x = stripes[y].unsqueeze(1).repeat(1, 3, 1, 1) + torch.randn(n, 3, 16, 16, generator=g)
    return TensorDataset(x, y)


class TextureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.fc = nn.Linear(24, 3)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.fc(x.amax((2, 3)))


def average_gradients(net, world):
    for p in net.parameters():
        grad = p.grad.contiguous()
        dist.all_reduce(grad)
        grad.div_(world)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    torch.manual_seed(0)
    net = TextureNet()
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    net = net.to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)

    data = textures(480, 2)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for x, y in loader:
            logits = net(x.contiguous(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            average_gradients(net, world)
            opt.step()
            stats += torch.tensor([loss.item() * len(y), (logits.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {(stats[0] / stats[2]).item():.4f} acc {(stats[1] / stats[2]).item():.3f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "texture.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
