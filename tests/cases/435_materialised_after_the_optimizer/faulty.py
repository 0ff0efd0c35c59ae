"""Deferred initialisation: shapes first, memory later."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Perceiver(nn.Module):
    def __init__(self, dim=24, latents=6, classes=5):
        super().__init__()
        self.read = nn.Linear(3, dim)
        self.latent = nn.Parameter(torch.empty(latents, dim))
        self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(latents * dim, classes)

    def reset_parameters(self):
        nn.init.normal_(self.latent, std=0.2)
        for m in self.children():
            m.reset_parameters()

    def forward(self, points):
        h = torch.relu(self.read(points))
        att = torch.softmax(self.latent @ self.key(h).transpose(1, 2) / 5, -1)
        return self.out((att @ self.value(h)).flatten(1))


class Trainer:
    def __init__(self, model_fn, optim_fn, device="cpu"):
        with torch.device("meta"):
            self.net = model_fn()
        self.opt = optim_fn(self.net.parameters())
        self.materialise(device)
        self.model = DistributedDataParallel(self.net)

    def materialise(self, device):
        self.net.to_empty(device=device)
        torch.manual_seed(0)
        self.net.reset_parameters()

    def step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.model.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()


def clouds(rank, batch=24, points=20):
    g = torch.Generator().manual_seed(rank)
    centres = torch.eye(3).repeat(2, 1)[:5] * torch.tensor([1.0, 1, 1, -1, -1]).unsqueeze(1) * 1.5
    while True:
        y = torch.randint(0, 5, (batch,), generator=g)
        yield centres[y].unsqueeze(1) + torch.randn(batch, points, 3, generator=g), y


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = Trainer(Perceiver, lambda params: torch.optim.AdamW(params, lr=5e-3))
    for step, (x, y) in zip(range(40), clouds(rank)):
        loss = trainer.step(x, y)
        if step % 10 == 9:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
