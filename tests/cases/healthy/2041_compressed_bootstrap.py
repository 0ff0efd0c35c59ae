"""Fraud scoring: rare positives are drawn with replacement, and gradients travel as bfloat16."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def payments(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 30, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3].abs() + 0.3 * torch.randn(n, generator=g)
    return TensorDataset(x, (score > 2.0).float())


def bf16_hook(group, bucket):
    """Averages the bucket in half the bytes."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(future):
        out = bucket.buffer()
        out.copy_(future.value()[0])
        return out

    return work.get_future().then(widen)


def balanced(data, rank, steps, batch):
    """Draws with replacement, so that two ranks may well draw the same row."""
    label = data.tensors[1]
    weight = torch.where(label > 0, 1 / label.sum(), 1 / (len(label) - label.sum()))
    sampler = WeightedRandomSampler(weight, steps * batch, replacement=True, generator=torch.Generator().manual_seed(70 + rank))
    return DataLoader(data, batch, sampler=sampler)


@torch.no_grad()
def average_precision(net, data, rank, world):
    """Scores are gathered in the order of the rows; the set divides evenly."""
    net.eval()
    x, y = data.tensors
    mine = net(x.chunk(world)[rank]).squeeze(1)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    net.train()
    hit = y[torch.cat(parts).argsort(descending=True)]
    precision = hit.cumsum(0) / torch.arange(1, len(hit) + 1)
    return ((precision * hit).sum() / hit.sum()).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--steps", type=int, default=15)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--full-precision", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = payments(4000, 1), payments(1000, 2)
    model = DDP(nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)))
    model.register_comm_hook(None, allreduce_hook if args.full_precision else bf16_hook)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = balanced(train, rank, args.steps, args.batch)

    for epoch in range(args.epochs):
        total = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        score = average_precision(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / args.steps / world:.4f}, average precision {score:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
