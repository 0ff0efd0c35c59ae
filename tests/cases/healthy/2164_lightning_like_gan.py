"""GAN on 2-d rings with a small module/trainer/callback framework and manual optimisation."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rank_zero_only(fn):
    def wrapped(*a, **k):
        if dist.get_rank() == 0:
            return fn(*a, **k)
    return wrapped


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.logged, self.trainer = {}, None

    def log(self, name, value, sync_dist=False):
        value = value.detach().clone()
        if sync_dist:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.logged[name] = value.item()

    def toggle(self, on, off):
        for p in on.parameters():
            p.requires_grad_(True)
        for p in off.parameters():
            p.requires_grad_(False)

    def untoggle(self):
        for p in self.parameters():
            p.requires_grad_(True)


class RingGAN(Module):
    def __init__(self, z_dim=8, width=64, r1_gamma=0.02, r1_every=4):
        super().__init__()
        self.z_dim, self.r1_gamma, self.r1_every = z_dim, r1_gamma, r1_every
        self.generator = nn.Sequential(nn.Linear(z_dim, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width),
                                       nn.ReLU(), nn.Linear(width, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
                                           nn.Linear(width, 1))

    def configure_optimizers(self):
        return (torch.optim.Adam(self.generator.parameters(), 2e-3, betas=(0.0, 0.9)),
                torch.optim.Adam(self.discriminator.parameters(), 2e-3, betas=(0.0, 0.9)))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.trainer.optimizers
        gen, disc = self.trainer.wrapped["generator"], self.trainer.wrapped["discriminator"]

        # discriminator
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), self.z_dim))
        regularise = batch_idx % self.r1_every == 0
        both = torch.cat([real, fake]).requires_grad_(regularise)
        scores = disc(both)
        s_real, s_fake = scores[: len(real)], scores[len(real):]
        d_loss = F.softplus(-s_real).mean() + F.softplus(s_fake).mean()
        if regularise:
            (gx,) = torch.autograd.grad(s_real.sum(), both, create_graph=True)
            penalty = gx[: len(real)].pow(2).sum(1).mean()
            total = d_loss + 0.5 * self.r1_gamma * self.r1_every * penalty
        else:
            total = d_loss
        opt_d.zero_grad()
        total.backward()
        opt_d.step()

        # generator: the critic only passes the gradient on
        self.toggle(self.generator, self.discriminator)
        g_loss = F.softplus(-self.discriminator(gen(torch.randn(len(real), self.z_dim)))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        self.untoggle()

        if batch_idx % 10 == 0:
            self.log("d_loss", d_loss, sync_dist=True)
            self.log("g_loss", g_loss, sync_dist=True)

    @torch.no_grad()
    def ring_error(self, generator, n=512):
        generator.eval()
        err = (generator(torch.randn(n, self.z_dim)).norm(dim=1) - 2.0).abs().mean()
        generator.train()
        dist.all_reduce(err)
        return err / dist.get_world_size()


class Callback:
    def on_fit_start(self, trainer, module): ...
    def on_train_batch_end(self, trainer, module): ...
    def on_epoch_end(self, trainer, module): ...


class AveragedGenerator(Callback):
    def __init__(self, decay=0.95):
        self.decay = decay

    def on_fit_start(self, trainer, module):
        self.ema = copy.deepcopy(module.generator).requires_grad_(False)

    def on_train_batch_end(self, trainer, module):
        with torch.no_grad():
            for e, p in zip(self.ema.parameters(), module.generator.parameters()):
                e.lerp_(p, 1 - self.decay)

    def on_epoch_end(self, trainer, module):
        module.log("ring_error_ema", module.ring_error(self.ema))
        module.log("ring_error", module.ring_error(module.generator))


class PrintAndSave(Callback):
    @rank_zero_only
    def on_epoch_end(self, trainer, module):
        print(trainer.current_epoch, {k: round(v, 3) for k, v in sorted(module.logged.items())}, flush=True)
        os.makedirs("checkpoints", exist_ok=True)
        torch.save(module.state_dict(), "checkpoints/last.ckpt")


class Trainer:
    def __init__(self, max_epochs, callbacks):
        self.max_epochs, self.callbacks = max_epochs, callbacks

    def call(self, hook, module):
        for c in self.callbacks:
            getattr(c, hook)(self, module)

    def fit(self, module, loader):
        module.trainer = self
        self.wrapped = {name: DDP(child) for name, child in module.named_children()}
        self.optimizers = module.configure_optimizers()
        self.call("on_fit_start", module)
        for self.current_epoch in range(self.max_epochs):
            loader.sampler.set_epoch(self.current_epoch)
            module.train()
            for batch_idx, batch in enumerate(loader):
                module.training_step(batch, batch_idx)
                self.call("on_train_batch_end", module)
            self.call("on_epoch_end", module)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    g = torch.Generator().manual_seed(3)
    angle = torch.rand(2048, generator=g) * 2 * math.pi
    radius = 2.0 + 0.05 * torch.randn(2048, generator=g)
    data = TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1))
    loader = DataLoader(data, 64, sampler=DistributedSampler(data, seed=5), drop_last=True)
    Trainer(12, [AveragedGenerator(), PrintAndSave()]).fit(RingGAN(), loader)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
