"""Shape recognition with BatchNorm and dropout; the main process checks the test set after every epoch."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(16 * 9, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


def blobs(n, seed):
    """A bright 4x4 patch in one of the four quarters."""
    g = torch.Generator().manual_seed(seed)
    quarter = torch.randint(0, 4, (n,), generator=g)
    x = 0.8 * torch.randn(n, 1, 12, 12, generator=g)
    dy, dx = torch.randint(0, 3, (2, n), generator=g)
    for i in range(n):
        top = 6 * int(quarter[i] // 2) + int(dy[i])
        left = 6 * int(quarter[i] % 2) + int(dx[i])
        x[i, 0, top : top + 4, left : left + 4] += 1.0
    return x, quarter


def shards(x, y, epoch, rank, world, size):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
    for idx in order[rank::world].split(size):
        yield x[idx], y[idx]


@torch.no_grad()
def test_accuracy(net, x, y):
    net.eval()
    hits = sum(int((net(xb).argmax(1) == yb).sum()) for xb, yb in zip(x.split(50), y.split(50)))
    net.train()
    return hits / len(y)


def setup():
    dist.init_process_group("gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(epochs=5):
    rank, world = setup()
    torch.manual_seed(0)
    model = DDP(Net())
    torch.manual_seed(10 + rank)
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    train_x, train_y = blobs(512, seed=1)
    test_x, test_y = blobs(300, seed=2)
    model.train()
    for epoch in range(epochs):
        running = torch.zeros(2)
        for x, y in shards(train_x, train_y, epoch, rank, world, 32):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(running)
        if rank == 0:
            acc = test_accuracy(model.module, test_x, test_y)
            print(f"epoch {epoch}: train loss {(running[0] / running[1]).item():.4f}, test accuracy {acc:.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
