"""Model parallel inside a process, data parallel between processes."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Halves(nn.Module):
    def __init__(self, first="cpu", second="cpu"):
        super().__init__()
        self.first_device, self.second_device = torch.device(first), torch.device(second)
        self.lower = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).to(first)
        self.upper = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)).to(second)

    def forward(self, x):
        h = self.lower(x.to(self.first_device))
        return self.upper(h.to(self.second_device))


def quadrants(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = 0.8 * torch.randn(n, 1, 10, 10, generator=g)
    for k in range(n):
        r, c = divmod(int(y[k]), 2)
        x[k, 0, 5 * r : 5 * r + 5, 5 * c : 5 * c + 5] += 1.0
    return TensorDataset(x, y)


@torch.no_grad()
def test(net, loader):
    net.eval()
    right = sum((net(x).argmax(1) == y).sum().item() for x, y in loader)
    net.train()
    return right / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    devices = os.environ.get("HALVES", "cpu,cpu").split(",")
    net = Halves(*devices)
    model = DDP(net)
    train, held_out = quadrants(480, 1), quadrants(120, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 24, sampler=sampler)
    test_loader = DataLoader(held_out, 60)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y.to(net.second_device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        for b in net.buffers():
            dist.broadcast(b, 0)
        accuracy = test(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
