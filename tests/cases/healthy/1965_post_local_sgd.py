#!/usr/bin/env python
"""Post-local SGD: synchronous gradient averaging first, then local steps with periodic model averaging.

Reference: Lin et al., "Don't use large mini-batches, use local SGD". Uses the pieces shipped with PyTorch.
"""
import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {
    "epochs": 5,
    "batch_size": 32,
    "lr": 0.08,
    "momentum": 0.9,
    "sync_steps": 40,   # fully synchronous warm-up
    "period": 4,        # local steps between two averages afterwards
    "hidden": 96,
    "data_seed": 11,
}


def two_spirals_4d(n, seed):
    """Three interleaved spirals lifted to four dimensions."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    r = torch.rand(n, generator=g) * 2.5 + 0.2
    theta = 2.2 * r + y * 2.0944 + 0.1 * torch.randn(n, generator=g)
    x = torch.stack([r * theta.cos(), r * theta.sin(), r, (theta - r).sin()], dim=1)
    return TensorDataset(x, y)


def make_model(hidden):
    return nn.Sequential(nn.Linear(4, hidden), nn.LayerNorm(hidden), nn.GELU(),
                         nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 3))


def replica_spread(model):
    """Largest distance of a parameter between this rank and the mean of all ranks, over all ranks."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = flat.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    worst = (flat - mean).abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


@torch.no_grad()
def accuracy(model, dataset, rank, world):
    model.eval()
    x, y = dataset.tensors
    x, y = x[rank::world], y[rank::world]
    hits = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = two_spirals_4d(1600, cfg["data_seed"]), two_spirals_4d(501, cfg["data_seed"] + 1)
    sampler = DistributedSampler(train, shuffle=True, seed=2, drop_last=True)
    loader = DataLoader(train, batch_size=cfg["batch_size"], sampler=sampler, drop_last=True)

    torch.manual_seed(1)
    net = DDP(make_model(cfg["hidden"]))

    # One rank a group: after `sync_steps` the hook no longer averages gradients over the processes.
    own_group, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=own_group, start_localSGD_iter=cfg["sync_steps"],
                              post_local_gradient_allreduce=False)
    net.register_comm_hook(state, post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=cfg["period"], warmup_steps=cfg["sync_steps"])
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=cfg["momentum"], nesterov=True),
        averager=averager,
    )
    criterion = nn.CrossEntropyLoss()

    step = 0
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
        mean_loss = torch.tensor(sum(losses) / len(losses))
        dist.all_reduce(mean_loss)
        spread = replica_spread(net)
        if rank == 0:
            phase = "sync" if step <= cfg["sync_steps"] else "local"
            print(f"epoch {epoch} [{phase}] loss {mean_loss.item() / world:.4f} replica spread {spread:.2e}", flush=True)

    # The last local steps may not have ended on a multiple of the period.
    average_parameters(net.parameters(), dist.group.WORLD)
    acc = accuracy(net.module, test, rank, world)
    if rank == 0:
        print(f"test accuracy of the averaged model: {acc:.3f}")
        torch.save(net.module.state_dict(), "post_local_sgd.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CONFIG)
