"""VQ-VAE on small grating images, EMA codebook, DDP on CPU."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Gratings(Dataset):
    """Oriented sinusoids, 1x16x16, deterministic per index."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        theta = torch.rand(n, generator=g) * 3.14159
        freq = 1.0 + 3.0 * torch.rand(n, generator=g)
        phase = torch.rand(n, generator=g) * 6.28318
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
        u = torch.cos(theta)[:, None, None] * xs + torch.sin(theta)[:, None, None] * ys
        self.x = torch.sin(3.14159 * freq[:, None, None] * u + phase[:, None, None]).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class EMAQuantizer(nn.Module):
    def __init__(self, num_codes, dim, decay=0.95, beta=0.25, eps=1e-5):
        super().__init__()
        self.num_codes, self.decay, self.beta, self.eps = num_codes, decay, beta, eps
        w = torch.randn(num_codes, dim) * 0.3
        self.register_buffer("codebook", w)
        self.register_buffer("cluster_size", torch.ones(num_codes))
        self.register_buffer("embed_avg", w.clone())

    @torch.no_grad()
    def _update(self, flat, onehot):
        counts = onehot.sum(0)
        sums = onehot.t() @ flat
        stats = torch.cat([counts.unsqueeze(1), sums], dim=1)
        counts, sums = stats[:, 0], stats[:, 1:]
        self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + self.num_codes * self.eps) * n
        self.codebook.copy_(self.embed_avg / size.unsqueeze(1))

    def forward(self, z):
        b, c, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, c)
        idx = torch.cdist(flat.detach(), self.codebook).argmin(1)
        q = self.codebook[idx]
        if self.training:
            self._update(flat.detach(), F.one_hot(idx, self.num_codes).float())
        commit = self.beta * F.mse_loss(flat, q)
        q = flat + (q - flat).detach()
        return q.view(b, h, w, c).permute(0, 3, 1, 2), commit, idx


class VQVAE(nn.Module):
    def __init__(self, hidden=32, dim=8, codes=64):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, hidden, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(hidden, hidden, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(hidden, dim, 1))
        self.vq = EMAQuantizer(codes, dim)
        self.dec = nn.Sequential(
            nn.Conv2d(dim, hidden, 3, 1, 1), nn.ReLU(),
            nn.ConvTranspose2d(hidden, hidden, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(hidden, 1, 4, 2, 1))

    def forward(self, x):
        q, commit, idx = self.vq(self.enc(x))
        return self.dec(q), commit, idx


@torch.no_grad()
def validate(model, loader, codes):
    model.eval()
    acc = torch.zeros(2, dtype=torch.float64)
    used = torch.zeros(codes)
    for x in loader:
        rec, _, idx = model.module(x)
        acc[0] += F.mse_loss(rec, x, reduction="sum").item() / x[0].numel()
        acc[1] += len(x)
        used += torch.bincount(idx, minlength=codes).float()
    dist.all_reduce(acc)
    dist.all_reduce(used)
    model.train()
    return (acc[0] / acc[1]).item(), int((used > 0).sum())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--codes", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--out", default="vqvae")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(7)

    train, val = Gratings(2048, 1), Gratings(256, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 64)

    # codebook is maintained by the EMA update itself, no need to re-send it before every forward
    model = DDP(VQVAE(codes=args.codes), broadcast_buffers=False)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x in loader:
            rec, commit, _ = model(x)
            rec_loss = F.mse_loss(rec, x)
            opt.zero_grad()
            (rec_loss + commit).backward()
            opt.step()
            running += torch.tensor([rec_loss.item(), 1.0])
        dist.all_reduce(running)
        mse, used = validate(model, val_loader, args.codes)
        if rank == 0:
            print(f"epoch {epoch} train_mse {running[0] / running[1]:.4f} val_mse {mse:.4f} codes {used}", flush=True)

    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(args.out, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
