"""Vector-quantised autoencoder for short signals; the codebook follows an exponential average."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Waves(IterableDataset):
    """A stream of short sine pieces; every rank takes each world-th one."""

    def __init__(self, first, last, rank, world):
        self.ids = range(first + rank, last, world)

    def __iter__(self):
        t = torch.linspace(0, 1, 32)
        for i in self.ids:
            g = torch.Generator().manual_seed(i)
            freq = 1 + torch.randint(0, 4, (1,), generator=g)
            phase = torch.rand(1, generator=g)
            yield torch.sin(6.2832 * (freq * t + phase)) + 0.05 * torch.randn(32, generator=g)


class Quantizer(nn.Module):
    def __init__(self, codes=24, dim=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", self.codebook.clone())

    def forward(self, z):
        code = torch.cdist(z.detach(), self.codebook).argmin(1)
        if self.training:
            self.update(z.detach(), F.one_hot(code, len(self.codebook)).to(z))
        q = self.codebook[code]
        commit = F.mse_loss(z, q)
        return z + (q - z).detach(), commit

    @torch.no_grad()
    def update(self, z, onehot):
        count, summed = onehot.sum(0), onehot.t() @ z
        self.usage.mul_(self.decay).add_(count, alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(summed, alpha=1 - self.decay)
        self.codebook.copy_(self.total / self.usage.clamp(min=1e-3).unsqueeze(1))


class VQModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
        self.quant = Quantizer()
        self.dec = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 32))

    def forward(self, x):
        q, commit = self.quant(self.enc(x))
        return self.dec(q), commit


@torch.no_grad()
def reconstruction_error(model, rank, world):
    model.eval()
    part = torch.zeros(2)
    for x in DataLoader(Waves(10_000, 10_400, rank, world), batch_size=100):
        y, _ = model.module(x)
        part += torch.tensor([(y - x).pow(2).sum().item(), x.numel()])
    dist.all_reduce(part)
    model.train()
    return (part[0] / part[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    model = DDP(VQModel(), broadcast_buffers=False)  # the codebook is kept equal by the quantiser itself
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step, x in enumerate(DataLoader(Waves(0, 3200, rank, world), batch_size=32)):
        y, commit = model(x)
        loss = F.mse_loss(y, x) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            err = reconstruction_error(model, rank, world)
            if rank == 0:
                print(f"step {step + 1}: reconstruction error {err:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "vq.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
