"""Hand-synchronised training with a few cached helpers for rank and size."""
import functools
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@functools.lru_cache(maxsize=None)
def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


@functools.lru_cache(maxsize=None)
def rank():
    return int(os.environ.get("RANK", "0"))


def get_logger():
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING, format=f"[{rank()}/{world_size()}] %(message)s")
    return logging.getLogger("train")


def sync_params(model):
    for t in model.state_dict().values():
        dist.broadcast(t, 0)


def sync_grads(model):
    if world_size() == 1:
        return
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world_size()


class Matcher(nn.Module):
    def __init__(self, users=60, items=80, dim=12):
        super().__init__()
        self.u, self.i = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.u.weight, std=0.3)
        nn.init.normal_(self.i.weight, std=0.3)

    def forward(self, user, item):
        return (self.u(user) * self.i(item)).sum(-1) + self.bias


def interactions(n):
    g = torch.Generator().manual_seed(88)
    a, b = torch.randn(60, 4, generator=g), torch.randn(80, 4, generator=g)
    u, i = torch.randint(0, 60, (n,), generator=g), torch.randint(0, 80, (n,), generator=g)
    return TensorDataset(u, i, ((a[u] * b[i]).sum(1) > 0).float())


def main():
    dist.init_process_group("gloo")
    log = get_logger()
    torch.manual_seed(3)
    model = Matcher()
    sync_params(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    data = interactions(2000)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for user, item, label in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), label)
            optimizer.zero_grad()
            loss.backward()
            sync_grads(model)
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        log.info("epoch %d loss %.4f", epoch, (total[0] / total[1]).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
