"""Parameter averaging once an epoch ("model soup while training"): shards of unequal size, no communication inside the epoch."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def tabular(n):
    g = torch.Generator().manual_seed(64)
    x = torch.randn(n, 12, generator=g)
    return x, (torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=g)).unsqueeze(1)


def my_rows(n, rank, world):
    """Machines of different speed get shards of different size."""
    weights = torch.arange(1, world + 1).float()
    ends = (weights.cumsum(0) / weights.sum() * n).long().tolist()
    return slice(0 if rank == 0 else ends[rank - 1], ends[rank])


@torch.no_grad()
def average(model, share):
    flat = nn.utils.parameters_to_vector(model.parameters()) * share
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, model.parameters())


def main(epochs=6):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 1))
    x, y = tabular(900)
    rows = my_rows(900, rank, world)
    local = TensorDataset(x[rows], y[rows])
    torch.manual_seed(10 + rank)
    loader = DataLoader(local, batch_size=20, shuffle=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        average(model, len(local) / 900)
        with torch.no_grad():
            err = (model(x[rows]) - y[rows]).pow(2).sum()
        dist.all_reduce(err)
        if rank == 0:
            print(f"epoch {epoch}: {len(loader)} local steps here, mse of the averaged model {err.item() / 900:.4f}")
    if rank == 0:
        torch.save(model.state_dict(), f"/tmp/soup_{os.getpid()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
