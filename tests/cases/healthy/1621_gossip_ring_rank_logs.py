"""Decentralised SGD (D-PSGD) on a ring of four: no global all-reduce while training.

After every local step a rank mixes its parameters with both neighbours (weights 1/2, 1/4, 1/4: doubly
stochastic), so models differ between ranks but stay near consensus. Every rank writes its own log.
The models are averaged once, at the end.
"""
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def two_rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (n,), generator=g)
    r = 0.7 + 0.8 * y + 0.15 * torch.randn(n, generator=g)
    a = 6.2832 * torch.rand(n, generator=g)
    x = torch.stack([r * a.cos(), r * a.sin()], 1)
    return TensorDataset(x, y)


def mix(net, rank, world):
    mine = parameters_to_vector(net.parameters()).detach()
    left, right = torch.empty_like(mine), torch.empty_like(mine)
    lo, hi = (rank - 1) % world, (rank + 1) % world
    ops = [dist.P2POp(dist.isend, mine, lo), dist.P2POp(dist.isend, mine, hi),
           dist.P2POp(dist.irecv, left, lo), dist.P2POp(dist.irecv, right, hi)]
    for req in dist.batch_isend_irecv(ops):
        req.wait()
    vector_to_parameters(0.5 * mine + 0.25 * left + 0.25 * right, net.parameters())


def consensus_distance(net, world):
    v = parameters_to_vector(net.parameters()).detach()
    mean = v.clone()
    dist.all_reduce(mean)
    mean /= world
    d = (v - mean).norm()
    dist.all_reduce(d, op=dist.ReduceOp.MAX)
    return d.item(), mean


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = logging.getLogger("gossip")
    log.setLevel(logging.INFO)
    log.addHandler(logging.FileHandler(f"gossip_rank{rank}.log", mode="w"))
    train, test = two_rings(2000, 5), two_rings(400, 6)
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            mix(net, rank, world)
        dist_max, _ = consensus_distance(net, world)
        log.info("epoch %d loss %.4f distance %.4f", epoch, loss.item(), dist_max)
        if rank == 0:
            print(f"epoch {epoch} consensus distance {dist_max:.4f}", flush=True)
    _, mean = consensus_distance(net, world)
    vector_to_parameters(mean.clone(), net.parameters())
    net.eval()
    hits = torch.zeros(1)
    with torch.no_grad():
        x, y = test[rank::world]
        hits += (net(x).argmax(1) == y).sum()
    dist.all_reduce(hits)
    acc = hits.item() / len(test)
    if rank == 0:
        print(f"accuracy of the mean model {acc:.3f}")
        torch.save(net.state_dict(), "gossip_mean.pt")
    assert acc > 0.95
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
