"""GRU forecaster; gradients travel in one flat message instead of one per tensor."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH, LR = 5, 12, 5e-3


class Waves(Dataset):
    def __init__(self, n=240, steps=18):
        g = torch.Generator().manual_seed(5)
        freq = 0.2 + 0.6 * torch.rand(n, 1, generator=g)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        t = torch.arange(steps + 1).float()
        self.values = torch.sin(freq * t + phase) + 0.05 * torch.randn(n, steps + 1, generator=g)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i, :-1].unsqueeze(1), self.values[i, -1:]


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class FlatExchange:
    """Packs all gradients into a single tensor and averages it over the processes."""

    def __init__(self, module):
        self.params = [p for p in module.parameters() if p.requires_grad]
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def average(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        return flat.norm().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Forecaster()
    exchange = FlatExchange(net)
    opt = torch.optim.Adam(net.parameters(), lr=LR)
    data = Waves()
    sampler = DistributedSampler(data, seed=9)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros(1)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.smooth_l1_loss(net(x), y)
            loss.backward()
            norm = exchange.average()
            opt.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        if rank == 0:
            mean = loss_sum.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch}: loss {mean:.5f}, last gradient norm {norm:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
