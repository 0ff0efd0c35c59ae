"""Hand-made data parallelism: losses are divided by the global count, gradients are summed."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(n=320):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(n, 9, generator=g)
    w = torch.randn(9, 3, generator=g)
    return TensorDataset(x, (x @ w + 0.2 * torch.randn(n, 3, generator=g)).argmax(1))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)  # the broadcast below makes the replicas equal
    net = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 3))
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train = data()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            count = torch.tensor(float(len(y)))
            dist.all_reduce(count)
            loss = nn.functional.cross_entropy(net(x), y, reduction="sum") / count
            opt.zero_grad()
            loss.backward()
            for p in net.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
