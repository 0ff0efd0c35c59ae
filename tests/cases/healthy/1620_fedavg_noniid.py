"""Federated averaging on four clients with skewed labels and different amounts of data.

Every round: the clients start from the global weights, make a local epoch with a new SGD (as the
algorithm says), then the weights are averaged in proportion to the client sizes. Rank 0 keeps a CSV.
"""
import csv

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

CLASSES, DIM, ROUNDS = 6, 16, 12


def population():
    g = torch.Generator().manual_seed(31)
    means = torch.randn(CLASSES, DIM, generator=g) * 1.2
    y = torch.randint(CLASSES, (3000,), generator=g)
    x = means[y] + torch.randn(3000, DIM, generator=g)
    return TensorDataset(x[:2400], y[:2400]), TensorDataset(x[2400:], y[2400:])


def split(labels, clients):
    """Dirichlet(0.5) split, the same on each rank."""
    torch.manual_seed(77)
    out = [[] for _ in range(clients)]
    for c in range(CLASSES):
        ids = (labels == c).nonzero().flatten()
        share = torch.distributions.Dirichlet(torch.full((clients,), 0.5)).sample()
        cuts = (share.cumsum(0)[:-1] * len(ids)).long()
        for k, part in enumerate(torch.tensor_split(ids, cuts)):
            out[k] += part.tolist()
    return out


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(DIM, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, CLASSES))


@torch.no_grad()
def federated_average(net, weight):
    for p in net.parameters():
        buf = p * weight
        dist.all_reduce(buf)
        p.copy_(buf)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = population()
    ids = split(train.tensors[1], world)[rank]
    sizes = torch.zeros(world)
    sizes[rank] = len(ids)
    dist.all_reduce(sizes)
    assert sizes.sum() == len(train)
    weight = (sizes[rank] / sizes.sum()).item()
    net = make_net()
    loader = DataLoader(Subset(train, ids), batch_size=32, shuffle=True,
                        generator=torch.Generator().manual_seed(rank))
    rows = []
    for rnd in range(ROUNDS):
        net.train()
        opt = torch.optim.SGD(net.parameters(), lr=0.1 * 0.93 ** rnd, momentum=0.5)
        total, count = 0.0, 0
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            total += loss.item() * len(y)
            count += len(y)
        federated_average(net, weight)
        net.eval()
        xt, yt = test.tensors
        with torch.no_grad():
            good = (net(xt[rank::world]).argmax(1) == yt[rank::world]).sum()
        stat = torch.tensor([total, float(count), float(good)])
        dist.all_reduce(stat)
        acc = stat[2].item() / len(test)
        rows.append((rnd, (stat[0] / stat[1]).item(), acc))
    if rank == 0:
        with open("fedavg.csv", "w", newline="") as fh:
            w = csv.writer(fh)
            w.writerow(["round", "local_loss", "test_acc"])
            w.writerows(rows)
        torch.save(net.state_dict(), "fedavg.pt")
        print(f"clients {[int(s) for s in sizes]} final acc {acc:.3f}", flush=True)
    assert acc > 0.8
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
