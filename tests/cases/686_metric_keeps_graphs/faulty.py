"""Regression with an R2 metric that collects what it needs for the epoch's end."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Collect:
    """Base of metrics that need all predictions."""

    def __init__(self):
        self.parts = []

    def update(self, prediction, target):
        self.parts.append((self.prepare(prediction), target))

    def prepare(self, prediction):
        return prediction.squeeze(-1)

    def gather(self):
        p = torch.cat([a for a, _ in self.parts])
        t = torch.cat([b for _, b in self.parts])
        both = torch.stack([p, t]).detach()
        out = [torch.empty_like(both) for _ in range(dist.get_world_size())]
        dist.all_gather(out, both)
        return torch.cat(out, 1)


class R2(Collect):
    def compute(self):
        p, t = self.gather()
        return (1 - (p - t).pow(2).sum() / (t - t.mean()).pow(2).sum()).item()


class Wide(nn.Module):
    def __init__(self, dim=64, width=768):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


def molecules(n):
    g = torch.Generator().manual_seed(41)
    x = torch.randn(n, 64, generator=g)
    return TensorDataset(x, torch.tanh(x[:, :8]).sum(1) + 0.3 * x[:, 8] * x[:, 9])


def main(epochs=3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(Wide())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = molecules(5120)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    metric = R2()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        metric.parts.clear()
        for x, y in loader:
            out = model(x)
            loss = nn.functional.mse_loss(out.squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metric.update(out, y)
        value = metric.compute()
        if rank == 0:
            print(f"epoch {epoch}: train R2 {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
