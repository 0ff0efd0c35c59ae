"""Class-conditional GAN on tiny images, both networks under DDP."""
import argparse
import copy
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, SIDE, LATENT = 4, 8, 12


def tiny_images(n=768, seed=3):
    """Blurred bars: the class is the orientation."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    grid = torch.arange(SIDE).float() - (SIDE - 1) / 2
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    angle = y * torch.pi / CLASSES
    d = xx * angle.cos().view(-1, 1, 1) + yy * angle.sin().view(-1, 1, 1)
    shift = torch.rand(n, 1, 1, generator=g) * 2 - 1
    x = torch.exp(-(d - shift) ** 2) * 2 - 1 + 0.05 * torch.randn(n, SIDE, SIDE, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


class Generator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.label = nn.Embedding(CLASSES, LATENT)
        self.fc = nn.Linear(2 * LATENT, width * 4)
        self.net = nn.Sequential(
            nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(width // 2, 1, 4, stride=2, padding=1), nn.Tanh())

    def forward(self, z, y):
        h = F.leaky_relu(self.fc(torch.cat([z, self.label(y)], 1)), 0.2)
        return self.net(h.view(len(z), -1, 2, 2))


class Discriminator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten())
        self.head = nn.Linear(8 * width, 1)
        self.project = nn.Embedding(CLASSES, 8 * width)

    def forward(self, x, y):
        h = self.features(x)
        return self.head(h).squeeze(1) + (self.project(y) * h).mean(1)


def init_weights(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
        nn.init.normal_(module.weight, 0.0, 0.05)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class MovingAverage:
    def __init__(self, module, decay=0.95):
        self.decay = decay
        self.module = copy.deepcopy(module).requires_grad_(False)

    @torch.no_grad()
    def update(self, module):
        for avg, p in zip(self.module.parameters(), module.parameters()):
            avg.lerp_(p, 1 - self.decay)


class GanTrainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        generator, discriminator = Generator().apply(init_weights), Discriminator().apply(init_weights)
        self.generator = DistributedDataParallel(generator)
        self.discriminator = DistributedDataParallel(discriminator)
        self.average = MovingAverage(generator)
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=args.lr, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=args.lr, betas=(0.5, 0.99))
        data = tiny_images()
        self.sampler = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
        self.loader = DataLoader(data, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)
        self.noise = torch.Generator().manual_seed(1000 + self.rank)
        self.history = []

    def latent(self, n):
        return torch.randn(n, LATENT, generator=self.noise)

    def clear(self):
        self.opt_g.zero_grad()
        self.opt_d.zero_grad()

    def generator_loss(self, fake, y):
        return F.softplus(-self.discriminator(fake, y)).mean()

    def discriminator_loss(self, real, fake, y):
        scores = self.discriminator(torch.cat([real, fake.detach()]), torch.cat([y, y]))
        on_real, on_fake = scores.chunk(2)
        return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()

    def train_step(self, real, y):
        self.clear()
        fake = self.generator(self.latent(len(y)), y)
        loss_g = self.generator_loss(fake, y)
        loss_g.backward()
        self.opt_g.step()
        self.average.update(self.generator.module)

        self.opt_d.zero_grad()
        loss_d = self.discriminator_loss(real, fake, y)
        loss_d.backward()
        self.opt_d.step()
        return torch.stack([loss_g.detach(), loss_d.detach()])

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for real, y in self.loader:
            total += self.train_step(real, y)
        dist.all_reduce(total)
        total /= self.world * len(self.loader)
        return {"generator": total[0].item(), "discriminator": total[1].item()}

    @torch.no_grad()
    def sample_grid(self):
        g = torch.Generator().manual_seed(0)
        y = torch.arange(CLASSES).repeat_interleave(4)
        return self.average.module(torch.randn(len(y), LATENT, generator=g), y)

    def save(self, epoch):
        if self.rank == 0:
            os.makedirs(self.args.out, exist_ok=True)
            torch.save({
                "epoch": epoch,
                "generator": self.generator.module.state_dict(),
                "average": self.average.module.state_dict(),
                "discriminator": self.discriminator.module.state_dict(),
                "opt_g": self.opt_g.state_dict(),
                "opt_d": self.opt_d.state_dict(),
            }, os.path.join(self.args.out, "last.pt"))
            torch.save(self.sample_grid(), os.path.join(self.args.out, f"grid_{epoch}.pt"))
            with open(os.path.join(self.args.out, "history.json"), "w") as f:
                json.dump(self.history, f)
        dist.barrier()

    def run(self):
        for epoch in range(self.args.epochs):
            losses = self.train_epoch(epoch)
            self.history.append(losses)
            if self.rank == 0:
                print(f"epoch {epoch}: " + " ".join(f"{k} {v:.4f}" for k, v in losses.items()))
            self.save(epoch)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=48)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--out", default="gan_out")
    args = p.parse_args()
    dist.init_process_group("gloo")
    GanTrainer(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
