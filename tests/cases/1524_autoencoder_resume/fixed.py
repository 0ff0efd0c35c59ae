"""Autoencoder in two legs: a first run, then a resumed run from its checkpoint."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT = "autoencoder.pt"
ENC_LR, DEC_LR = 5e-4, 4e-3


class AutoEncoder(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.decoder = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code * (torch.arange(code.shape[1]) < 6))


def curves(n=512):
    g = torch.Generator().manual_seed(12)
    basis = torch.randn(5, 24, generator=g)
    return TensorDataset(torch.tanh(torch.randn(n, 5, generator=g) @ basis / 2))


def run_epochs(model, opt, first, last):
    data = curves()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)


def first_leg():
    torch.manual_seed(0)
    net = AutoEncoder()
    opt = torch.optim.Adam([
        {"params": net.encoder.parameters(), "lr": ENC_LR},
        {"params": net.decoder.parameters(), "lr": DEC_LR},
    ])
    run_epochs(DDP(net), opt, 0, 4)
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": 4}, CKPT)
    dist.barrier()


def second_leg():
    saved = torch.load(CKPT, map_location="cpu")
    net = AutoEncoder()
    net.load_state_dict(saved["net"])
    opt = torch.optim.Adam([
        {"params": net.encoder.parameters(), "lr": ENC_LR},
        {"params": net.decoder.parameters(), "lr": DEC_LR},
    ])
    opt.load_state_dict(saved["opt"])
    run_epochs(DDP(net), opt, saved["epoch"], saved["epoch"] + 3)


def main():
    dist.init_process_group("gloo")
    first_leg()
    second_leg()
    if dist.get_rank() == 0:
        os.remove(CKPT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
