"""Post-local SGD on 4 processes in two subgroups of two.

The first 24 iterations all-reduce gradients over all ranks. From then on gradients are averaged only
in the pair and the models of all ranks are averaged every 4 steps; a last full average precedes the
evaluation.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState, post_localSGD_hook)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WARM = 24


def friedman(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 8, generator=g)
    y = (10 * torch.sin(3.14159 * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
         + 10 * x[:, 3] + 5 * x[:, 4]) + 0.5 * torch.randn(n, generator=g)
    return x, y.unsqueeze(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = friedman(2000, 1)
    xv, yv = friedman(400, 2)
    mu, sd = y.mean(), y.std()
    ds = TensorDataset(x * 2 - 1, (y - mu) / sd)
    sampler = DistributedSampler(ds, seed=17)
    loader = DataLoader(ds, batch_size=25, sampler=sampler)

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
    ddp = DistributedDataParallel(model)
    subgroup, _ = dist.new_subgroups(group_size=2)
    ddp.register_comm_hook(
        PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=WARM),
        post_localSGD_hook)
    opt = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9),
        averager=PeriodicModelAverager(period=4, warmup_steps=WARM))
    loss_fn = nn.MSELoss()

    for epoch in range(5):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for a, b in loader:
            opt.zero_grad()
            loss = loss_fn(ddp(a), b)
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item() * len(a), float(len(a))])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} train mse {seen[0] / seen[1]:.4f}", flush=True)

    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p)
            p /= world
    model.eval()
    acc = torch.zeros(2)
    with torch.no_grad():
        xs, ys = xv[rank::world] * 2 - 1, (yv[rank::world] - mu) / sd
        acc += torch.tensor([(model(xs) - ys).pow(2).sum().item(), float(len(ys))])
    dist.all_reduce(acc)
    mse = (acc[0] / acc[1]).item()
    if rank == 0:
        torch.save({"net": model.state_dict(), "mu": mu, "sd": sd}, "postlocal.pt")
        print(f"valid mse (standardised) {mse:.4f}")
    assert mse < 0.35
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
