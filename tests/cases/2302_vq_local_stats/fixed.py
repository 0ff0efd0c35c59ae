import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ap = argparse.ArgumentParser("vq autoencoder for short audio frames")
ap.add_argument("--codes", type=int, default=32)
ap.add_argument("--dim", type=int, default=16)
ap.add_argument("--decay", type=float, default=0.95)
ap.add_argument("--beta", type=float, default=0.25)
ap.add_argument("--epochs", type=int, default=5)
ap.add_argument("--batch", type=int, default=32)
ap.add_argument("--lr", type=float, default=2e-3)
ap.add_argument("--clips", type=int, default=1280)


class Tones(Dataset):
    """Clips of 128 samples: two partials with an attack/decay envelope."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        t = torch.arange(128) / 128
        f = torch.randint(2, 14, (n, 1), generator=g).float()
        ratio = torch.randint(2, 4, (n, 1), generator=g).float()
        phase = 6.283 * torch.rand(n, 1, generator=g)
        env = torch.exp(-3 * torch.rand(n, 1, generator=g) * t)
        wave = torch.sin(6.283 * f * t + phase) + 0.4 * torch.sin(6.283 * f * ratio * t)
        self.clips = (env * wave + 0.02 * torch.randn(n, 128, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        return self.clips[i]


class EMAQuantizer(nn.Module):
    def __init__(self, n_codes, dim, decay):
        super().__init__()
        self.n_codes, self.decay = n_codes, decay
        start = 0.5 * torch.randn(n_codes, dim)
        self.register_buffer("codes", start)
        self.register_buffer("usage", torch.ones(n_codes))
        self.register_buffer("total", start.clone())

    @torch.no_grad()
    def _update(self, flat, idx):
        onehot = F.one_hot(idx, self.n_codes).type_as(flat)
        stats = torch.cat([onehot.sum(0, keepdim=True).t(), onehot.t() @ flat], dim=1)
        dist.all_reduce(stats)
        self.usage.lerp_(stats[:, 0], 1 - self.decay)
        self.total.lerp_(stats[:, 1:], 1 - self.decay)
        n = self.usage.sum()
        smooth = (self.usage + 1e-3) / (n + self.n_codes * 1e-3) * n
        self.codes.copy_(self.total / smooth.unsqueeze(1))

    def forward(self, z):
        b, c, t = z.shape
        flat = z.permute(0, 2, 1).reshape(-1, c)
        idx = torch.cdist(flat.detach(), self.codes).argmin(1)
        q = self.codes[idx].view(b, t, c).permute(0, 2, 1)
        commit = F.mse_loss(z, q.detach())
        if self.training:
            self._update(flat.detach(), idx)
        return z + (q - z).detach(), commit, idx


class VQAuto(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv1d(1, 32, 7, stride=2, padding=3), nn.GELU(),
            nn.Conv1d(32, 48, 5, stride=2, padding=2), nn.GELU(),
            nn.Conv1d(48, a.dim, 3, stride=2, padding=1),
        )
        self.vq = EMAQuantizer(a.codes, a.dim, a.decay)
        self.dec = nn.Sequential(
            nn.ConvTranspose1d(a.dim, 48, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose1d(48, 32, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose1d(32, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        q, commit, idx = self.vq(self.enc(x))
        return self.dec(q), commit, idx


def run(a):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(99)
    data = Tones(a.clips)
    sampler = DistributedSampler(data, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=a.batch, sampler=sampler, drop_last=True)
    model = DDP(VQAuto(a))
    opt = torch.optim.Adam(model.parameters(), lr=a.lr)

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        hist = torch.zeros(a.codes)
        running = torch.zeros(2)
        for x in loader:
            recon, commit, idx = model(x)
            rec = F.mse_loss(recon, x)
            loss = rec + a.beta * commit
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            hist += torch.bincount(idx, minlength=a.codes).float()
            running += torch.stack([rec.detach(), commit.detach()])
        dist.all_reduce(hist)
        dist.all_reduce(running)
        running /= world * len(loader)
        p = hist / hist.sum()
        perplexity = torch.exp(-(p * (p + 1e-9).log()).sum())
        if rank == 0:
            print(f"epoch {epoch} recon {running[0]:.4f} commit {running[1]:.4f} perplexity {perplexity:.1f}")

    if rank == 0:
        torch.save({"net": model.module.state_dict(), "args": vars(a)}, "vq.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(ap.parse_args())
