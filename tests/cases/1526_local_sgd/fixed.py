"""Regression with post-local SGD."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def surface(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 4, generator=g) - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] - x[:, 3:] ** 2
    return TensorDataset(x, y + 0.05 * torch.randn(n, 1, generator=g))


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--warmup", type=int, default=30, help="steps with averaged gradients")
    ap.add_argument("--period", type=int, default=4, help="steps between two averages of the weights")
    ap.add_argument("--lr", type=float, default=0.1)
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))

    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=args.warmup)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=args.period, warmup_steps=args.warmup)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)

    data = surface(480, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            averager.average_parameters(model.parameters())
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {(total[0] / total[1]).item():.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "surface.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
