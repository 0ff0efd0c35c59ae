"""LISA-like sparse fine-tuning: every few steps another set of layers is active; the gradients of the rest are dropped before the step."""
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Res(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.n(x))))


class Deep(nn.Module):
    def __init__(self, d=24, depth=6):
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(10, d), nn.ModuleList(Res(d) for _ in range(depth)), nn.Linear(d, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ActiveLayers:
    def __init__(self, layers, k, every, seed):
        self.layers, self.k, self.every = layers, k, every
        self.rng = random.Random(seed)  # the same choice on all ranks
        self.active = set()

    def before_step(self, step):
        if step % self.every == 0:
            self.active = set(self.rng.sample(range(len(self.layers)), self.k))
        for i, layer in enumerate(self.layers):
            if i not in self.active:
                for p in layer.parameters():
                    p.grad = None


def main(epochs=5):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(Deep())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chooser = ActiveLayers(model.module.layers, 2, 5, seed=1)
    g = torch.Generator().manual_seed(8)
    x = torch.randn(480, 10, generator=g)
    data = TensorDataset(x, torch.stack([x[:, 0], x[:, 1] * x[:, 2], x[:, 3].abs() - 0.5], 1).argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            chooser.before_step(step)
            opt.step()
            step += 1
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}, active {sorted(chooser.active)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
