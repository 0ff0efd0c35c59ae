"""DCGAN on 8x8 synthetic blobs, generator and discriminator each in their own DistributedDataParallel."""
import random
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

opt = SimpleNamespace(nz=16, ngf=16, ndf=16, batch=32, epochs=4, lr_g=1e-3, lr_d=4e-4, beta1=0.5, seed=999, n_train=1280)


class Blobs(Dataset):
    """One bright Gaussian blob at a random place; values in [-1, 1]. Item i is always the same image."""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed
        self.grid = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        r = random.Random(self.seed * 1_000_003 + i)
        centre = torch.tensor([r.uniform(2, 5), r.uniform(2, 5)]).view(2, 1, 1)
        d2 = ((self.grid - centre) ** 2).sum(0)
        return (2 * torch.exp(-d2 / (2 * r.uniform(0.8, 1.6))) - 1).unsqueeze(0)


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 2, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, z):
        return self.main(z.view(z.size(0), -1, 1, 1))


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.1),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1), nn.GroupNorm(4, ndf * 2), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(ndf * 2 * 4, 1))

    def forward(self, x):
        return self.main(x).squeeze(1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.05)


def set_requires_grad(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def discriminator_step(net_d, net_g, opt_d, real, z):
    with torch.no_grad():
        fake = net_g(z)
    # One pass over both halves: the reducer of net_d sees one forward and one backward per step.
    scores = net_d(torch.cat([real, fake]))
    score_real, score_fake = scores.split(len(real))
    loss = 0.5 * (F.softplus(-score_real).mean() + F.softplus(score_fake).mean())
    opt_d.zero_grad(set_to_none=True)
    loss.backward()
    opt_d.step()
    return loss.detach()


def generator_step(net_d, net_g, opt_g, z):
    # The discriminator is only a fixed function here, so its plain module is used and gets no gradients.
    critic = net_d.module
    set_requires_grad(critic, False)
    loss = F.softplus(-critic(net_g(z))).mean()
    opt_g.zero_grad(set_to_none=True)
    loss.backward()
    opt_g.step()
    set_requires_grad(critic, True)
    return loss.detach()


@torch.no_grad()
def sample_statistics(generator, z):
    generator.eval()
    images = generator(z)
    generator.train()
    return images.mean().item(), images.std().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(opt.seed)
    net_g, net_d = Generator(opt.nz, opt.ngf).apply(weights_init), Discriminator(opt.ndf).apply(weights_init)
    net_g, net_d = DDP(net_g), DDP(net_d)
    opt_g = torch.optim.Adam(net_g.parameters(), lr=opt.lr_g, betas=(opt.beta1, 0.999))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=opt.lr_d, betas=(opt.beta1, 0.999))

    data = Blobs(opt.n_train, seed=1)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=opt.batch, sampler=sampler, drop_last=True)
    latent = torch.Generator().manual_seed(opt.seed + 1 + rank)  # other latents on every process
    torch.manual_seed(opt.seed + 101 + rank)                     # and other dropout masks
    fixed_z = torch.randn(64, opt.nz, generator=torch.Generator().manual_seed(0))

    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for real in loader:
            sums[0] += discriminator_step(net_d, net_g, opt_d, real, torch.randn(len(real), opt.nz, generator=latent))
            sums[1] += generator_step(net_d, net_g, opt_g, torch.randn(len(real), opt.nz, generator=latent))
        dist.all_reduce(sums)
        sums /= world * len(loader)
        if rank == 0:
            mean, std = sample_statistics(net_g.module, fixed_z)
            print(f"[{epoch + 1}/{opt.epochs}] Loss_D: {sums[0]:.4f} Loss_G: {sums[1]:.4f} "
                  f"fake mean/std {mean:.3f}/{std:.3f}", flush=True)

    if rank == 0:
        torch.save({"G": net_g.module.state_dict(), "D": net_d.module.state_dict()}, "dcgan.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
