"""Mixture of two experts, picked per batch by a flag in the data: find_unused_parameters is needed and given."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Domains(Dataset):
    """whole batches belong to one domain; an item is a batch"""

    def __init__(self, n=96, size=16):
        g = torch.Generator().manual_seed(2)
        self.domain = torch.randint(2, (n,), generator=g)
        self.x = torch.randn(n, size, 8, generator=g)
        sign = (1 - 2 * self.domain).view(n, 1, 1).float()
        self.y = sign * self.x[..., :4].sum(-1, keepdim=True) / 2 + self.x[..., 4:5]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], int(self.domain[i])


class TwoExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 24)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1)) for _ in range(2))

    def forward(self, x, domain):
        return self.experts[domain](torch.relu(self.shared(x)))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(TwoExperts(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Domains()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=None, sampler=sampler)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, y, domain in loader:  # ranks may be in different domains at the same step
            loss = nn.functional.mse_loss(model(x, domain), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"pass {epoch}: mean loss {(seen[0] / seen[1]).item():.4f} over {int(seen[1])} batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
