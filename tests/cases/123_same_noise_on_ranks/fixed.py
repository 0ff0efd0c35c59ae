"""Denoising diffusion on short curves: trainer class, weights and gradients synchronised by hand."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS = 50


class Curves(Dataset):
    def __init__(self, n=512):
        g = torch.Generator().manual_seed(88)
        t = torch.linspace(0, 1, 16)
        amp = 0.5 + torch.rand(n, 1, generator=g)
        phase = 6.2832 * torch.rand(n, 1, generator=g)
        self.data = amp * torch.sin(6.2832 * t + phase)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


class NoiseNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.when = nn.Embedding(STEPS, 16)
        self.net = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 16))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.when(t)], dim=1))


class DiffusionTrainer:
    def __init__(self, seed=0, lr=2e-3, batch=32):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.net = NoiseNet()
        self.params = list(self.net.parameters())
        self.opt = torch.optim.AdamW(self.params, lr=lr)
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.15, STEPS), dim=0)
        data = Curves()
        self.sampler = DistributedSampler(data, seed=seed)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler)
        torch.manual_seed(seed + 1 + self.rank)  # noise and time steps are each rank's own

    def loss(self, x0):
        t = torch.randint(0, STEPS, (len(x0),))
        noise = torch.randn_like(x0)
        a = self.alpha_bar[t].unsqueeze(1)
        return nn.functional.mse_loss(self.net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)

    def average_gradients(self):
        flat = torch.cat([p.grad.view(-1) for p in self.params])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for p in self.params:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            mean = torch.zeros(())
            for x0 in self.loader:
                loss = self.loss(x0)
                self.opt.zero_grad()
                loss.backward()
                self.average_gradients()
                self.opt.step()
                mean += loss.detach() / len(self.loader)
            dist.all_reduce(mean)
            if self.rank == 0 and epoch % 4 == 3:
                print(f"epoch {epoch}: noise loss {mean.item() / self.world:.4f}")

    def save(self, path):
        if self.rank == 0:
            torch.save(self.net.state_dict(), path)
        dist.barrier()


def main():
    dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
    trainer = DiffusionTrainer()
    trainer.fit(epochs=16)
    trainer.save("noise_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
