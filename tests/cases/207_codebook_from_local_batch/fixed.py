"""Vector-quantised autoencoder with EMA codebook updates in forward()."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMAQuantizer(nn.Module):
    def __init__(self, num_codes=16, dim=8, decay=0.95, eps=1e-5):
        super().__init__()
        self.decay, self.eps, self.num_codes = decay, eps, num_codes
        embed = torch.randn(num_codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(num_codes))
        self.register_buffer("embed_sum", embed.clone())

    def forward(self, z):
        codes = torch.cdist(z.detach(), self.embed).argmin(1)
        quantized = self.embed[codes]
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(codes, self.num_codes).type_as(z)
                counts, sums = onehot.sum(0), onehot.t() @ z.detach()
                dist.all_reduce(counts)
                dist.all_reduce(sums)
                self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
                self.embed_sum.mul_(self.decay).add_(sums, alpha=1 - self.decay)
                n = self.cluster_size.sum()
                smoothed = (self.cluster_size + self.eps) / (n + self.num_codes * self.eps) * n
                self.embed.copy_(self.embed_sum / smoothed.unsqueeze(1))
        commitment = F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment


class VQAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
        self.quantizer = EMAQuantizer()
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24))

    def forward(self, x):
        z, commitment = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(z), x) + 0.25 * commitment


def clusters(n=512):
    g = torch.Generator().manual_seed(4)
    c = torch.randn(12, 24, generator=g)
    return TensorDataset(c[torch.randint(12, (n,), generator=g)] + 0.15 * torch.randn(n, 24, generator=g))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(VQAutoencoder())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = clusters()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for (x,) in loader:
            opt.zero_grad()
            loss = model(x)
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
