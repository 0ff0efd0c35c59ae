"""Masked pre-training of a small encoder, then fine-tuning with a new head, both under DDP."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spectra(n, seed, bands=32):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (n,), generator=g)
    center = 4.0 + 8 * kind + torch.randn(n, generator=g)
    axis = torch.arange(bands).float()
    x = torch.exp(-((axis - center[:, None]) ** 2) / 18) + 0.1 * torch.randn(n, bands, generator=g)
    return TensorDataset(x, kind)


class MaskedAutoencoder(nn.Module):
    def __init__(self, bands=32, dim=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(bands, 96), nn.GELU(), nn.Linear(96, dim))
        self.decoder = nn.Sequential(nn.Linear(dim, 96), nn.GELU(), nn.Linear(96, bands))

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x, mask):
        return self.decoder(self.encoder(x * mask))


class LandCover(nn.Module):
    """Pre-trained encoder and a linear classifier."""

    def __init__(self, classes=4, dim=48):
        super().__init__()
        self.model = MaskedAutoencoder(dim=dim)
        self.model.decoder.requires_grad_(False)
        self.classifier = nn.Linear(dim, classes)

    def forward(self, x):
        return self.classifier(self.model.encode(x))


def land_cover(path):
    net = LandCover()
    state = torch.load(path, weights_only=True)
    net.load_state_dict(state, strict=False)
    return net


def run(model, data, epochs, step, rank, title):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=2e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, kind in loader:
            loss = step(model, x, kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{title} {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}", flush=True)


def pretrain_step(model, x, _):
    mask = (torch.rand_like(x) > 0.4).float()
    return ((model(x, mask) - x) ** 2 * (1 - mask)).mean()


def finetune_step(model, x, kind):
    return F.cross_entropy(model(x), kind)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pretrain-epochs", type=int, default=4)
    ap.add_argument("--finetune-epochs", type=int, default=3)
    ap.add_argument("--weights", default="mae.pth")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    mae = MaskedAutoencoder()
    ddp = DDP(mae)
    torch.manual_seed(10 + rank)  # masks
    run(ddp, spectra(512, 1), args.pretrain_epochs, pretrain_step, rank, "pretrain")
    if rank == 0:
        torch.save(mae.state_dict(), args.weights)
    dist.barrier()

    torch.manual_seed(1)
    net = land_cover(args.weights)
    run(DDP(net), spectra(96, 2), args.finetune_epochs, finetune_step, rank, "finetune")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
