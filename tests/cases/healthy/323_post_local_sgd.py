"""Post-local SGD: after a warm-up the ranks go their own way and average parameters every few steps."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--warmup", type=int, default=8)
    p.add_argument("--period", type=int, default=4)
    p.add_argument("--epochs", type=int, default=5)
    return p.parse_args()


def moons(n=512):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(2, (n,), generator=g)
    t = 3.1416 * torch.rand(n, generator=g)
    x = torch.stack([t.cos() + y, t.sin() * (1 - 2 * y) + 0.3 * y], 1)
    return TensorDataset(x + 0.1 * torch.randn(n, 2, generator=g), y)


if __name__ == "__main__":
    args = get_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    # gradients are all-reduced up to the warm-up, within a subgroup of one rank from then on
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=args.warmup)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=args.period, warmup_steps=args.warmup)
    opt = PostLocalSGDOptimizer(optim=torch.optim.SGD(model.parameters(), lr=0.2), averager=averager)
    data = moons()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros(1)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}: mean loss {loss_sum.item() / len(loader) / dist.get_world_size():.4f}")
    # leave with one model: the last average
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
    dist.destroy_process_group()
