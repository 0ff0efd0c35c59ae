"""Each process owns files of different length; Join keeps the replicas in step."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def own_batches(rank, epoch, size=16):
    n = 200 + 90 * rank
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(n, 6, generator=g)
    y = (x[:, :3].sum(1) > x[:, 3:].abs().sum(1) - 2).long()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1000 * epoch + rank))
    for rows in order.split(size):
        yield x[rows], y[rows]


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(5):
        loss_sum, hits, seen = 0.0, 0, 0
        with Join([model]):
            for x, y in own_batches(rank, epoch):
                logits = model(x)
                loss = nn.functional.cross_entropy(logits, y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                loss_sum += loss.item() * len(y)
                hits += (logits.argmax(1) == y).sum().item()
                seen += len(y)
        stats = torch.tensor([loss_sum, hits, seen], dtype=torch.float64)
        dist.reduce(stats, dst=0)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[2]:.4f} acc {stats[1] / stats[2]:.3f} n {int(stats[2])}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "joined.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
