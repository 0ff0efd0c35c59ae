#!/usr/bin/env python
# DCGAN after pytorch/examples/dcgan: two networks, two optimizers, rank-specific noise. GroupNorm instead of BatchNorm.
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument('--batchSize', type=int, default=8)
parser.add_argument('--nz', type=int, default=8)
parser.add_argument('--ngf', type=int, default=8)
parser.add_argument('--ndf', type=int, default=8)
parser.add_argument('--niter', type=int, default=2)
parser.add_argument('--lr', type=float, default=0.0002)
parser.add_argument('--beta1', type=float, default=0.5)
parser.add_argument('--manualSeed', type=int, default=999)
opt = parser.parse_args()

dist.init_process_group('gloo')
rank = int(os.environ['RANK'])
# weights are made from one seed (and DDP broadcasts them anyway), noise from another one per process
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)


class Blobs(Dataset):
    """8x8 pictures with one bright disc."""

    def __len__(self):
        return 192

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        cx, cy = 2 + 4 * torch.rand(2, generator=g)
        yy, xx = torch.meshgrid(torch.arange(8.), torch.arange(8.), indexing='ij')
        return (torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 4) * 2 - 1).unsqueeze(0)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.GroupNorm):
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, opt.ngf * 2, 4, 1, 0, bias=False), nn.GroupNorm(2, opt.ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(opt.ngf * 2, 1, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, opt.ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf, 1, 4, 1, 0, bias=False))

    def forward(self, img):
        return self.main(img).view(-1)


netG = Generator()
netG.apply(weights_init)
netD = Discriminator()
netD.apply(weights_init)
netG, netD = DDP(netG), DDP(netD)
torch.manual_seed(opt.manualSeed + 1 + rank)

criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

dataset = Blobs()
sampler = DistributedSampler(dataset, shuffle=True)
dataloader = DataLoader(dataset, batch_size=opt.batchSize, sampler=sampler)

for epoch in range(opt.niter):
    sampler.set_epoch(epoch)
    sums = torch.zeros(3)
    for i, real in enumerate(dataloader):
        b = real.size(0)
        # (1) update D: maximize log(D(x)) + log(1 - D(G(z)))
        noise = torch.randn(b, opt.nz, 1, 1)
        fake = netG(noise)
        optimizerD.zero_grad()
        verdict = netD(torch.cat([real, fake.detach()]))
        target = torch.cat([torch.ones(b), torch.zeros(b)])
        errD = 2 * criterion(verdict, target)
        errD.backward()
        optimizerD.step()
        # (2) update G: maximize log(D(G(z))); what this leaves in D's .grad is zeroed above before D's next step
        optimizerG.zero_grad()
        errG = criterion(netD(fake), torch.ones(b))
        errG.backward()
        optimizerG.step()
        sums += torch.tensor([errD.item(), errG.item(), 1.0])
    dist.all_reduce(sums)
    if rank == 0:
        print('[%d/%d] Loss_D: %.4f Loss_G: %.4f' % (epoch, opt.niter, sums[0] / sums[2], sums[1] / sums[2]))
dist.destroy_process_group()
