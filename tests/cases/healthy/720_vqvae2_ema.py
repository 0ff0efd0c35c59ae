# VQ-VAE after rosinality/vq-vae-2-pytorch: EMA codebook with all-reduced counts and sums, train(epoch) with comm gather of the statistics
import argparse
import os

import torch
from torch import distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def get_world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    if get_world_size() == 1:
        return tensor
    dist.all_reduce(tensor, op=op)
    return tensor


def all_gather(obj):
    out = [None] * get_world_size()
    dist.all_gather_object(out, obj)
    return out


class Quantize(nn.Module):
    def __init__(self, dim, n_embed, decay=0.9, eps=1e-5):
        super().__init__()
        self.dim, self.n_embed, self.decay, self.eps = dim, n_embed, decay, eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, input):
        flatten = input.reshape(-1, self.dim)
        d = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, ind = (-d).max(1)
        onehot = F.one_hot(ind, self.n_embed).type(flatten.dtype)
        ind = ind.view(*input.shape[:-1])
        quantize = F.embedding(ind, self.embed.transpose(0, 1))
        if self.training:
            onehot_sum = onehot.sum(0)
            embed_sum = flatten.detach().transpose(0, 1) @ onehot
            all_reduce(onehot_sum)
            all_reduce(embed_sum)
            self.cluster_size.data.mul_(self.decay).add_(onehot_sum, alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(embed_sum, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cs = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
            self.embed.data.copy_(self.embed_avg / cs.unsqueeze(0))
        diff = (quantize.detach() - input).pow(2).mean()
        return input + (quantize - input).detach(), diff, ind


class VQVAE(nn.Module):
    def __init__(self, channel=16, dim=8, n_embed=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, channel, 4, 2, 1), nn.ReLU(), nn.Conv2d(channel, channel, 4, 2, 1), nn.ReLU(), nn.Conv2d(channel, dim, 1))
        self.quantize = Quantize(dim, n_embed)
        self.dec = nn.Sequential(nn.ConvTranspose2d(dim, channel, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(channel, 1, 4, 2, 1))

    def forward(self, x):
        q, diff, _ = self.quantize(self.enc(x).permute(0, 2, 3, 1))
        return self.dec(q.permute(0, 3, 1, 2)), diff.unsqueeze(0)


def train(epoch, loader, model, optimizer):
    criterion = nn.MSELoss()
    mse_sum = mse_n = 0
    for i, (img,) in enumerate(loader):
        model.zero_grad()
        out, latent_loss = model(img)
        recon_loss = criterion(out, img)
        latent_loss = latent_loss.mean()
        loss = recon_loss + 0.25 * latent_loss
        loss.backward()
        optimizer.step()
        part = {"mse_sum": recon_loss.item() * img.shape[0], "mse_n": img.shape[0]}
        for p in all_gather(part):
            mse_sum += p["mse_sum"]
            mse_n += p["mse_n"]
        if dist.get_rank() == 0 and i % 4 == 0:
            print(f"epoch: {epoch + 1}; mse: {recon_loss.item():.5f}; latent: {latent_loss.item():.3f}; avg mse: {mse_sum / mse_n:.5f}")
            if i == 4:
                model.eval()
                with torch.no_grad():
                    sample, _ = model.module(img[:4])
                    torch.save(torch.cat([img[:4], sample]), f"/tmp/vq_{os.getpid()}_{epoch}.pt")
                model.train()


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(30)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    c = 2 + 8 * torch.rand(320, 2, 1, 1, generator=g)
    imgs = torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / 4)[:, None]
    dataset = TensorDataset(imgs)
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(VQVAE())
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    for i in range(args.epoch):
        sampler.set_epoch(i)
        train(i, loader, model, optimizer)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"/tmp/vqvae_{os.getpid()}_{str(i + 1).zfill(3)}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epoch", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--batch", type=int, default=20)
    main(p.parse_args())
