"""A little accelerator: prepare() wraps what has to be wrapped, backward() and reduce() hide the rest."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Accel:
    def __init__(self):
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(self.backend)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.devices = torch.cuda.device_count() or 1

    @property
    def main(self):
        return self.rank == 0

    def prepare_model(self, model):
        if self.devices > 1:
            model = nn.parallel.DistributedDataParallel(model)
        return model

    def prepare_loader(self, dataset, batch_size, shuffle):
        sampler = DistributedSampler(dataset, self.world, self.rank, shuffle=shuffle)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler)

    def unwrap(self, model):
        return getattr(model, "module", model)

    def reduce(self, *values):
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t)
        return t.tolist()

    def print(self, *args):
        if self.main:
            print(*args, flush=True)

    def close(self):
        dist.destroy_process_group()


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 6))
        self.dec = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 32))

    def forward(self, x):
        return self.dec(self.enc(x))


def curves(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 32)
    a = torch.randn(n, 3, generator=g)
    return TensorDataset(a[:, :1] * torch.sin(6.28 * t) + a[:, 1:2] * torch.cos(6.28 * t) + a[:, 2:] * t)


def main(epochs=5, sigma=0.3):
    accel = Accel()
    torch.manual_seed(15)
    model = accel.prepare_model(Denoiser())
    torch.manual_seed(15 + accel.rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = accel.prepare_loader(curves(480, 1), 20, shuffle=True)
    valid = accel.prepare_loader(curves(80, 2), 20, shuffle=False)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        for (clean,) in loader:
            noisy = clean + sigma * torch.randn_like(clean)
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = n = 0
        with torch.no_grad():
            for (clean,) in valid:
                total += (model(clean) - clean).pow(2).mean(1).sum().item()
                n += len(clean)
        total, n = accel.reduce(total, n)
        accel.print(f"epoch {epoch}: validation mse {total / n:.4f}")
    if accel.main:
        torch.save(accel.unwrap(model).state_dict(), f"/tmp/denoiser_{os.getpid()}.pt")
    accel.close()


if __name__ == "__main__":
    main()
