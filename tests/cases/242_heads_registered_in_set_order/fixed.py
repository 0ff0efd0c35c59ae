"""Eight property heads on one trunk."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PROPERTIES = ["density", "gap", "hardness", "volume", "melting", "entropy", "mobility", "charge"]


def requested_properties():
    """the user's wishes, without duplicates"""
    wanted = PROPERTIES + ["gap", "volume"]
    return sorted(set(wanted))


class Materials(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(6)
        self.x = torch.randn(n, 10, generator=g)
        w = torch.randn(len(PROPERTIES), 10, generator=g) / 3
        self.y = {p: torch.tanh(self.x @ w[i] + 0.3 * i) for i, p in enumerate(PROPERTIES)}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], {p: v[i] for p, v in self.y.items()}


class PropertyNet(nn.Module):
    def __init__(self, properties, width=28):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict()
        for name in properties:
            self.heads[name] = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h).squeeze(1) for name, head in self.heads.items()}


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    properties = requested_properties()
    model = DistributedDataParallel(PropertyNet(properties))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    data = Materials(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        sums = torch.zeros(len(PROPERTIES))
        for x, target in loader:
            pred = model(x)
            losses = {p: nn.functional.mse_loss(pred[p], target[p]) for p in PROPERTIES}
            loss = sum(losses.values())
            opt.zero_grad()
            loss.backward()
            opt.step()
            sums += torch.stack([losses[p].detach() for p in PROPERTIES])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: " + " ".join(f"{p} {v / len(loader) / world:.3f}" for p, v in zip(PROPERTIES, sums.tolist())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
