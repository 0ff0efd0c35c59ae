"""Warm start from the weights of a first, short run."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def blobs(n=240, noise=0.7, seed=5):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    corner = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    return TensorDataset(corner[y] + noise * torch.randn(n, 2, generator=g), y)


def fit(net, data, epochs, device, rank):
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")


def network():
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pretrained", default="pre.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    net = network().to(device)
    fit(net, blobs(noise=0.9, seed=4), 2, device, rank)
    if rank == 0:
        torch.save(net.state_dict(), args.pretrained)
    dist.barrier()

    net = network().to(device)
    net.load_state_dict(torch.load(args.pretrained, map_location=device))
    fit(net, blobs(), 3, device, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
