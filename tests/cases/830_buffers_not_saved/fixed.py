"""Train with BatchNorm, store, load into a fresh network for the test."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sensors(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    unit = torch.tensor([3.0, 50.0, 0.2, 900.0, 7.0])
    x = torch.randn(n, 5, generator=g)
    x[torch.arange(n), y] += 2.5
    return TensorDataset(unit * (x + 4), y)


def build():
    return nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)
    )


def test(net, data, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    with torch.no_grad():
        hits = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--out", default="sensors.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)

    model = DDP(build())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = sensors(320, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    net = build()
    net.load_state_dict(torch.load(args.out))
    accuracy = test(net, sensors(200, 2), rank, world)
    if rank == 0:
        print(f"test accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
