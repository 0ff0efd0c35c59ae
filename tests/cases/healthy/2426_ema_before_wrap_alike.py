"""An average copied before the wrap, where all ranks are seeded alike; its BatchNorm buffers are copied; all ranks measure with it, each its share."""
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def net():
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


@torch.no_grad()
def update(average, model, decay=0.95):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)
    for a, b in zip(average.buffers(), model.buffers()):
        a.copy_(b)


@torch.no_grad()
def measure(model, loader):
    model.eval()
    told = torch.zeros(3)
    for x, y in loader:
        out = model(x)
        told += torch.tensor([F.cross_entropy(out, y, reduction="sum").item(), (out.argmax(1) == y).sum().item(), len(y)])
    own = told.clone()
    dist.all_reduce(told)
    return own, told


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    x = torch.randn(1280, 12)
    y = (x[:, :4] + 0.5 * x[:, 4:8]).argmax(1)
    train, test = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32, sampler=sampler)
    tests = DataLoader(test, 64, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = F.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update(average, model.module)
        for buffer in average.buffers():
            dist.broadcast(buffer, 0)
        own, told = measure(average, tests)
        model.train()
        if rank == 0:
            print(f"epoch {epoch} val loss {own[0] / own[2]:.4f} ({told[0] / told[2]:.4f}) accuracy {told[1] / told[2]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
