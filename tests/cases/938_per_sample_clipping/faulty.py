"""Differentially private fine-tuning: per-sample clipping, noise, update."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def patients(n=320, dim=20):
    gen = torch.Generator().manual_seed(70)
    x = torch.randn(n, dim, generator=gen)
    risk = x[:, :4].sum(1) - x[:, 4] * x[:, 5]
    return TensorDataset(x, (risk > 0).float())


class RiskModel(nn.Module):
    def __init__(self, dim=20, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class PrivateStep:
    """One DP-SGD step (Abadi et al.) for a model that is given as module + parameters."""

    def __init__(self, model, clip, noise, seed):
        self.module = model.module
        self.clip, self.noise = clip, noise
        self.generator = torch.Generator().manual_seed(seed)
        self.per_sample = vmap(grad(self.loss_of), in_dims=(None, 0, 0))

    def loss_of(self, params, x, y):
        logit = functional_call(self.module, params, (x[None],))
        return nn.functional.binary_cross_entropy_with_logits(logit, y[None])

    def clipped_mean(self, grads, batch):
        squares = sum(g.flatten(1).pow(2).sum(1) for g in grads.values())
        factor = (self.clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        return {k: torch.einsum("b,b...->...", factor, g) / batch for k, g in grads.items()}

    def __call__(self, x, y):
        params = {k: p.detach() for k, p in self.module.named_parameters()}
        grads = self.clipped_mean(self.per_sample(params, x, y), len(x))
        for name, p in self.module.named_parameters():
            g = grads[name]
            g += self.noise * self.clip / len(x) * torch.randn(g.shape, generator=self.generator)
            p.grad = g


def accuracy(model, data, rank, world):
    model.eval()
    with torch.no_grad():
        x, y = data[rank::world]
        counts = torch.tensor([((model(x) > 0).float() == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--noise", type=float, default=0.3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = DDP(RiskModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = patients()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    step = PrivateStep(model, args.clip, args.noise, seed=100 + rank)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            step(x, y)
            optimizer.step()
        acc = accuracy(model, data, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
