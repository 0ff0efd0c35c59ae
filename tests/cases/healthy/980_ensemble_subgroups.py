"""Deep ensemble on four ranks: two members of two ranks each; DDP inside a member, predictions joined across the members."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MEMBERS = 2


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    t = 3.1416 * torch.rand(n, generator=g)
    x = torch.stack([t.cos() + y, t.sin() * (1 - 2 * y) + 0.4 * y], 1)
    return TensorDataset(x + 0.15 * torch.randn(n, 2, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    size = world // MEMBERS
    member, inner = divmod(rank, size)
    # every rank takes part in making every group, also those to which it does not belong
    teams = [dist.new_group(list(range(m * size, (m + 1) * size))) for m in range(MEMBERS)]
    columns = [dist.new_group(list(range(i, world, size))) for i in range(size)]
    team, column = teams[member], columns[inner]

    torch.manual_seed(300 + member)  # members differ, ranks of a member do not
    width = 24 if member == 0 else 40
    model = DDP(nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)), process_group=team)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2 if member == 0 else 5e-3)
    train, test = moons(320, 1), moons(200, 2)
    sampler = DistributedSampler(train, num_replicas=size, rank=inner, seed=member)  # each member sees all samples in its own order
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total, group=team)
        if inner == 0:
            print(f"member {member} epoch {epoch}: loss {total.item() / len(loader) / size:.4f}", flush=True)

    x, y = test.tensors
    own = slice(inner, None, size)
    with torch.no_grad():
        probs = F.softmax(model.module(x[own]), dim=1)
    single = (probs.argmax(1) == y[own]).sum().float()
    dist.all_reduce(probs, group=column)  # across the members, for the same samples
    joint = (probs.argmax(1) == y[own]).sum().float()
    counts = torch.stack([single, joint])
    dist.all_reduce(counts, group=team)
    table = [torch.zeros(2) for _ in range(MEMBERS)]
    dist.all_gather(table, counts, group=column)
    if rank == 0:
        print("members", [round(t[0].item() / len(y), 3) for t in table], "ensemble", round(counts[1].item() / len(y), 3))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
