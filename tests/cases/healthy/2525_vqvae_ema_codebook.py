import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def all_reduce(t, op=dist.ReduceOp.SUM):
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(t, op=op)
    return t


class Quantize(nn.Module):
    def __init__(self, dim, n_embed, decay=0.95, eps=1e-5, dead_after=0.05):
        super().__init__()
        self.dim, self.n_embed, self.decay, self.eps, self.dead_after = dim, n_embed, decay, eps, dead_after
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x):
        flat = x.reshape(-1, self.dim)
        d = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        ind = d.argmin(1)
        onehot = F.one_hot(ind, self.n_embed).type(flat.dtype)
        quant = F.embedding(ind.view(*x.shape[:-1]), self.embed.t())
        if self.training:
            with torch.no_grad():
                size = all_reduce(onehot.sum(0))
                total = all_reduce(flat.detach().t() @ onehot)
                self.cluster_size.mul_(self.decay).add_(size, alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(total, alpha=1 - self.decay)
                n = self.cluster_size.sum()
                norm = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
                self.embed.copy_(self.embed_avg / norm.unsqueeze(0))
                self.revive(flat.detach())
        diff = (quant.detach() - x).pow(2).mean()
        return x + (quant - x).detach(), diff, ind

    def revive(self, flat):
        dead = self.cluster_size < self.dead_after
        if not bool(dead.any()):
            return
        picks = flat[torch.randint(len(flat), (self.n_embed,))].t().contiguous()
        dist.broadcast(picks, src=0)
        self.embed[:, dead] = picks[:, dead]
        self.embed_avg[:, dead] = picks[:, dead]
        self.cluster_size[dead] = 1.0


class VQVAE(nn.Module):
    def __init__(self, ch=24, dim=8, n_embed=48):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, ch, 4, 2, 1), nn.ReLU(),
                                 nn.Conv2d(ch, dim, 1))
        self.quantize = Quantize(dim, n_embed)
        self.dec = nn.Sequential(nn.Conv2d(dim, ch, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(ch, ch, 4, 2, 1), nn.ReLU(),
                                 nn.ConvTranspose2d(ch, 1, 4, 2, 1))

    def forward(self, x):
        q, diff, ind = self.quantize(self.enc(x).permute(0, 2, 3, 1))
        return self.dec(q.permute(0, 3, 1, 2)), diff, ind


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    c = torch.rand(n, 2, 1, 1, generator=g) * 10 + 3
    r = torch.rand(n, 1, 1, generator=g) * 3 + 1.5
    img = torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / r ** 2)
    return TensorDataset(img.unsqueeze(1))


def train(epoch, loader, model, opt):
    model.train()
    se, n = torch.zeros(()), 0
    for (img,) in loader:
        opt.zero_grad()
        out, latent, _ = model(img)
        recon = F.mse_loss(out, img)
        (recon + 0.25 * latent).backward()
        opt.step()
        se += recon.detach() * len(img)
        n += len(img)
    stat = all_reduce(torch.stack([se, torch.tensor(float(n))]))
    return (stat[0] / stat[1]).item()


@torch.no_grad()
def validate(loader, model, n_embed):
    model.eval()
    stat, hist = torch.zeros(2, dtype=torch.float64), torch.zeros(n_embed)
    for (img,) in loader:
        out, _, ind = model(img)
        stat += torch.tensor([F.mse_loss(out, img, reduction="sum").item(), img.numel()], dtype=torch.float64)
        hist += torch.bincount(ind, minlength=n_embed)
    all_reduce(stat)
    all_reduce(hist)
    p = hist / hist.sum()
    return (stat[0] / stat[1]).item(), torch.exp(-(p * (p + 1e-10).log()).sum()).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    model = DistributedDataParallel(VQVAE())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    train_set, val_set = make(1200, 1), make(256, 2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=4)
    loader = DataLoader(train_set, batch_size=50, sampler=sampler)
    val = DataLoader(val_set, batch_size=64, sampler=DistributedSampler(val_set, shuffle=False))
    for epoch in range(7):
        sampler.set_epoch(epoch)
        mse = train(epoch, loader, model, opt)
        vmse, ppl = validate(val, model.module, 48)
        if rank == 0:
            print(f"epoch {epoch} train {mse:.5f} val {vmse:.5f} perplexity {ppl:.1f}")
            os.makedirs("vq", exist_ok=True)
            torch.save(model.module.state_dict(), f"vq/vqvae_{epoch:03d}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
