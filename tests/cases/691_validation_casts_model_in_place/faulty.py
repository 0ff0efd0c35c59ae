"""Trains in fp32 and validates in bfloat16, as the model will be served."""
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Serving:
    """Context in which the model answers as in production."""

    def __init__(self, model, dtype=torch.bfloat16):
        self.model, self.dtype = model, dtype

    def __enter__(self):
        self.model.eval()
        return self.model.to(self.dtype)

    def __exit__(self, *exc):
        self.model.float()
        self.model.train()
        return False


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(18, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return self.out(torch.relu(self.mid(self.norm(torch.relu(self.inp(x))))))


def concrete(n, seed):
    w = torch.randn(18, 3, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 18, generator=g)
    return TensorDataset(x, (torch.tanh(x @ w)).prod(1, keepdim=True) * 3 + 0.05 * torch.randn(n, 1, generator=g))


def served_error(net, loader):
    total = torch.zeros(2)
    with torch.no_grad(), Serving(net) as served:
        for x, y in loader:
            out = served(x.bfloat16()).float()
            total += torch.tensor([(out - y).abs().sum().item(), float(len(x))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main(epochs=5):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(30)
    model = DDP(Regressor())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, valid = concrete(480, 1), concrete(96, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=24, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=24, sampler=DistributedSampler(valid, shuffle=False))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        error = served_error(model.module, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: served MAE {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
