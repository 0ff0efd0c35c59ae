# StyleGAN2 after rosinality/stylegan2-pytorch train.py: requires_grad toggled under DDP, lazy R1 and path-length regularisation, EMA, reduced loss dict
import argparse
import math
import os
import random
import tempfile

import torch
from torch import autograd, nn, optim
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils import data


def data_sampler(dataset, shuffle, distributed):
    if distributed:
        return data.distributed.DistributedSampler(dataset, shuffle=shuffle)
    return data.RandomSampler(dataset) if shuffle else data.SequentialSampler(dataset)


def sample_data(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            yield batch
        epoch += 1


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(model1, model2, decay=0.999):
    par1, par2 = dict(model1.named_parameters()), dict(model2.named_parameters())
    for k in par1.keys():
        par1[k].data.mul_(decay).add_(par2[k].data, alpha=1 - decay)


def d_logistic_loss(real_pred, fake_pred):
    return F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()


def d_r1_loss(real_pred, real_img):
    grad_real, = autograd.grad(outputs=real_pred.sum(), inputs=real_img, create_graph=True)
    return grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()


def g_path_regularize(fake_img, latents, mean_path_length, decay=0.01):
    noise = torch.randn_like(fake_img) / math.sqrt(fake_img.shape[2] * fake_img.shape[3])
    grad, = autograd.grad(outputs=(fake_img * noise).sum(), inputs=latents, create_graph=True)
    path_lengths = torch.sqrt(grad.pow(2).sum(1) + 1e-8)
    path_mean = mean_path_length + decay * (path_lengths.mean() - mean_path_length)
    return (path_lengths - path_mean).pow(2).mean(), path_mean.detach(), path_lengths


def reduce_loss_dict(loss_dict):
    world_size = dist.get_world_size()
    with torch.no_grad():
        keys = sorted(loss_dict.keys())
        losses = torch.stack([loss_dict[k] for k in keys], 0)
        dist.reduce(losses, dst=0)
        if dist.get_rank() == 0:
            losses /= world_size
        return {k: v for k, v in zip(keys, losses)}


def reduce_sum(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


class Generator(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.style = nn.Sequential(nn.Linear(dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32))
        self.const = nn.Parameter(torch.randn(1, 32, 4, 4))
        self.c1, self.c2 = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, z, return_latents=False):
        w = self.style(z)
        x = self.const * (1 + w[:, :, None, None])
        x = F.interpolate(F.leaky_relu(self.c1(x), 0.2), scale_factor=2)
        img = self.c2(x)
        return img, (w if return_latents else None)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))

    def forward(self, x):
        return self.net(x)


def train(args, loader, generator, discriminator, g_optim, d_optim, g_ema, out):
    loader = sample_data(loader)
    mean_path_length, mean_path_length_avg = 0, 0
    r1_loss, path_loss = torch.tensor(0.0), torch.tensor(0.0)
    path_lengths = torch.tensor(0.0)
    loss_dict = {}
    g_module, d_module = generator.module, discriminator.module
    accum = 0.5 ** (32 / (10 * 1000))
    for i in range(args.iter):
        real_img, = next(loader)
        requires_grad(generator, False)
        requires_grad(discriminator, True)
        noise = torch.randn(args.batch, args.latent)
        fake_img, _ = generator(noise)
        pred = discriminator(torch.cat([real_img, fake_img]))
        real_pred, fake_pred = pred.chunk(2)
        d_loss = d_logistic_loss(real_pred, fake_pred)
        loss_dict["d"] = d_loss
        loss_dict["real_score"], loss_dict["fake_score"] = real_pred.mean(), fake_pred.mean()
        discriminator.zero_grad()
        d_loss.backward()
        d_optim.step()

        if i % args.d_reg_every == 0:
            real_img.requires_grad = True
            real_pred = discriminator(real_img)
            r1_loss = d_r1_loss(real_pred, real_img)
            discriminator.zero_grad()
            (args.r1 / 2 * r1_loss * args.d_reg_every + 0 * real_pred[0]).backward()
            d_optim.step()
        loss_dict["r1"] = r1_loss

        requires_grad(generator, True)
        requires_grad(discriminator, False)
        fake_img, _ = generator(torch.randn(args.batch, args.latent))
        g_loss = F.softplus(-discriminator(fake_img)).mean()
        loss_dict["g"] = g_loss
        generator.zero_grad()
        g_loss.backward()
        g_optim.step()

        if i % args.g_reg_every == 0:
            fake_img, latents = generator(torch.randn(args.batch // 2, args.latent), return_latents=True)
            path_loss, mean_path_length, path_lengths = g_path_regularize(fake_img, latents, mean_path_length)
            generator.zero_grad()
            weighted = 2 * args.g_reg_every * path_loss + 0 * fake_img[0, 0, 0, 0]
            weighted.backward()
            g_optim.step()
            mean_path_length_avg = reduce_sum(mean_path_length).item() / dist.get_world_size()
        loss_dict["path"], loss_dict["path_length"] = path_loss, path_lengths.mean()
        accumulate(g_ema, g_module, accum)
        reduced = reduce_loss_dict(loss_dict)
        if dist.get_rank() == 0 and i % 5 == 0:
            print(f"d: {reduced['d'].mean().item():.4f}; g: {reduced['g'].mean().item():.4f}; r1: {reduced['r1'].mean().item():.4f}; path: {reduced['path'].mean().item():.4f}; mean path: {mean_path_length_avg:.4f}")
            if i % 20 == 0:
                torch.save({"g": g_module.state_dict(), "d": d_module.state_dict(), "g_ema": g_ema.state_dict(), "g_optim": g_optim.state_dict(), "d_optim": d_optim.state_dict()}, f"{out}/{i:06d}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="StyleGAN2 trainer")
    parser.add_argument("--iter", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--r1", type=float, default=1.0)
    parser.add_argument("--d_reg_every", type=int, default=8)
    parser.add_argument("--g_reg_every", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()
    args.latent = 16
    dist.init_process_group("gloo")
    torch.manual_seed(17 + dist.get_rank())
    random.seed(17 + dist.get_rank())
    generator, discriminator, g_ema = Generator(args.latent), Discriminator(), Generator(args.latent)
    g_ema.eval()
    g_ratio, d_ratio = args.g_reg_every / (args.g_reg_every + 1), args.d_reg_every / (args.d_reg_every + 1)
    g_optim = optim.Adam(generator.parameters(), lr=args.lr * g_ratio, betas=(0.0, 0.99**g_ratio))
    d_optim = optim.Adam(discriminator.parameters(), lr=args.lr * d_ratio, betas=(0.0, 0.99**d_ratio))
    generator = nn.parallel.DistributedDataParallel(generator, broadcast_buffers=False)
    discriminator = nn.parallel.DistributedDataParallel(discriminator, broadcast_buffers=False)
    accumulate(g_ema, generator.module, 0)
    g = torch.Generator().manual_seed(4)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
    ph = torch.rand(192, 1, 1, generator=g) * 6.28
    images = torch.sin(4 * (xx * ph.cos() + yy * ph.sin()))[:, None]
    dataset = data.TensorDataset(images)
    loader = data.DataLoader(dataset, batch_size=args.batch, sampler=data_sampler(dataset, True, True), drop_last=True)
    out = tempfile.mkdtemp() if dist.get_rank() == 0 else None
    train(args, loader, generator, discriminator, g_optim, d_optim, g_ema, out)
    dist.destroy_process_group()
