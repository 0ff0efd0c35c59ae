"""Multi-term loss for depth estimation; the terms are averaged over the ranks and shown, the largest first."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ELU(), nn.Conv2d(12, 12, 3, padding=1), nn.ELU(), nn.Conv2d(12, 1, 3, padding=1)
        )

    def forward(self, x):
        return self.net(x)


def terms(pred, depth):
    d = pred - depth
    gx, gy = d[..., :, 1:] - d[..., :, :-1], d[..., 1:, :] - d[..., :-1, :]
    return {
        "l1": d.abs().mean(),
        "scale": d.mean((1, 2, 3)).pow(2).mean(),
        "grad_x": 0.5 * gx.abs().mean(),
        "grad_y": 0.5 * gy.abs().mean(),
        "tail": F.relu(d.abs() - 0.5).mean(),
    }


class Progress:
    """Running means of the terms of one epoch."""

    def __init__(self):
        self.sums, self.steps = {}, 0

    def update(self, values):
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item()
        self.steps += 1

    def largest_first(self):
        means = {name: s / self.steps for name, s in self.sums.items()}
        return sorted(means.items(), key=lambda item: -item[1])

    def reduced(self):
        result = {}
        for name, value in sorted(self.largest_first()):
            t = torch.tensor(value, dtype=torch.float64)
            dist.all_reduce(t)
            result[name] = t.item() / dist.get_world_size()
        return result


def rooms(n=192):
    gen = torch.Generator().manual_seed(77)
    depth = F.interpolate(torch.rand(n, 1, 3, 3, generator=gen), size=12, mode="bilinear", align_corners=True) * 2
    image = torch.cat([depth, depth.flip(-1), 2 - depth], 1) + 0.3 * torch.randn(n, 3, 12, 12, generator=gen)
    return TensorDataset(image, depth)


def main(epochs=6, batch=8, lr=2e-3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(14)
    model = DDP(DepthNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    data = rooms()
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        progress = Progress()
        for image, depth in loader:
            parts = terms(model(image), depth)
            optimizer.zero_grad()
            sum(parts.values()).backward()
            optimizer.step()
            progress.update(parts)
        shown = progress.reduced()
        if rank == 0:
            print(f"epoch {epoch}: " + "  ".join(f"{k} {v:.4f}" for k, v in shown.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
