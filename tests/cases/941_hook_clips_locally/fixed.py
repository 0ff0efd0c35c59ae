"""Forecasting with an LSTM. Spikes in the data make gradients explode now and then, so each weight's gradient is bounded."""
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("forecast")


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class GradientBound:
    """Keeps the norm of each weight's gradient below `limit`."""

    def __init__(self, limit):
        self.limit = limit
        self.handles = []

    def bounded(self, grad):
        return grad * (self.limit / (grad.norm() + 1e-8)).clamp(max=1.0)

    def attach(self, module):
        pass

    def before_step(self, module):
        for p in module.parameters():
            p.grad = self.bounded(p.grad)

    def detach(self):
        while self.handles:
            self.handles.pop().remove()


def series(n=320, window=20):
    gen = torch.Generator().manual_seed(55)
    t = torch.arange(n + window).float()
    y = torch.sin(t / 5) + 0.3 * torch.sin(t / 2.3) + 0.05 * torch.randn(n + window, generator=gen)
    y[torch.rand(n + window, generator=gen) < 0.03] += 6.0
    x = y.unfold(0, window, 1)[:n].unsqueeze(-1)
    return TensorDataset(x, y[window : window + n].unsqueeze(-1))


def fit(model, bound, epochs=4, batch=16, lr=0.05):
    data = series()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.8)
    bound.attach(model.module)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        error = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            bound.before_step(model.module)
            optimizer.step()
            error += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(error)
        log.info("epoch %d: mse %.4f", epoch, error[0] / error[1])
    bound.detach()


def main():
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(33)
    fit(DistributedDataParallel(Forecaster()), GradientBound(limit=0.05))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
