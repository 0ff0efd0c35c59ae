"""Vocoder-like upsampling network with weight normalisation."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Upsampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Conv1d(4, 24, 3, padding=1)
        self.up = nn.ConvTranspose1d(24, 12, 4, stride=4)
        self.post = nn.Conv1d(12, 1, 7, padding=3)

    def apply_weight_norm(self):
        for m in (self.pre, self.up, self.post):
            weight_norm(m)
        return self

    def forward(self, mel):
        h = nn.functional.leaky_relu(self.pre(mel), 0.1)
        h = nn.functional.leaky_relu(self.up(h), 0.1)
        return torch.tanh(self.post(h))


def tones(n=240):
    g = torch.Generator().manual_seed(40)
    f = torch.randint(1, 5, (n,), generator=g)
    t = torch.arange(32.0) / 32 * 6.2832
    wave = (f[:, None] * t).sin()[:, None] * 0.8
    mel = nn.functional.one_hot(f - 1, 4).float()[:, :, None].expand(-1, -1, 8)
    phase = torch.linspace(-1, 1, 8).expand(n, 1, 8)
    return TensorDataset(mel + 0.2 * phase + 0.05 * torch.randn(n, 4, 8, generator=g), wave)


def spectral_loss(pred, target):
    a, b = torch.fft.rfft(pred).abs(), torch.fft.rfft(target).abs()
    return (pred - target).abs().mean() + 0.05 * (a - b).abs().mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Upsampler()
    net.apply_weight_norm()
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr, betas=(0.8, 0.99))
    model = DDP(net)
    data = tones()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 15, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for mel, wave in loader:
            loss = spectral_loss(model(mel), wave)
            model.zero_grad()
            loss.backward()
            opt.step()
            s += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(s)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {s[0] / s[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
