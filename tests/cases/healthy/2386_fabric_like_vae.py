"""A thin hand-written 'fabric' around a compiled VAE, with a profiler on the first process."""
import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Fabric:
    def __init__(self, backend="gloo", precision="32"):
        self.backend, self.precision = backend, precision

    def launch(self):
        dist.init_process_group(self.backend)
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        return self

    @property
    def is_global_zero(self):
        return self.global_rank == 0

    def seed_everything(self, seed, per_rank=False):
        torch.manual_seed(seed + (self.global_rank if per_rank else 0))

    def setup(self, module, optimizer, compile_backend=None):
        if compile_backend:
            module = torch.compile(module, backend=compile_backend)
        return DistributedDataParallel(module), optimizer

    def setup_dataloaders(self, loader):
        shuffle = isinstance(loader.sampler, RandomSampler)
        sampler = DistributedSampler(loader.dataset, shuffle=shuffle, drop_last=loader.drop_last)
        return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext()

    def backward(self, loss):
        loss.backward()

    def no_backward_sync(self, module, enabled):
        return module.no_sync() if enabled else nullcontext()

    def all_reduce(self, tensor, reduce_op="mean"):
        t = tensor.detach().clone()
        dist.all_reduce(t)
        return t / self.world_size if reduce_op == "mean" else t

    def clip_gradients(self, module, max_norm):
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm)

    def print(self, *a):
        if self.is_global_zero:
            print(*a)

    def save(self, path, state):
        if self.is_global_zero:
            torch.save(state, path)
        dist.barrier()

    def teardown(self):
        dist.destroy_process_group()


class VAE(nn.Module):
    def __init__(self, d_in=64, hidden=64, latent=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d_in, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, d_in))

    def forward(self, x, noise):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.dec(mu + noise * torch.exp(0.5 * logvar)), mu, logvar


def elbo(recon, x, mu, logvar, beta):
    rec = F.mse_loss(recon, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return (rec + beta * kl).mean(), rec.mean(), kl.mean()


def manifold(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.Generator().manual_seed(123)
    a, b = torch.randn(4, 32, generator=w), torch.randn(32, 64, generator=w) / 5.6
    z = torch.randn(n, 4, generator=g)
    return TensorDataset(torch.tanh(z @ a) @ b + 0.05 * torch.randn(n, 64, generator=g))


def train_one_epoch(fabric, model, optimizer, loader, epoch, args, prof):
    model.train()
    loader.sampler.set_epoch(epoch)
    beta = args.beta * min(1.0, (epoch + 1) / 3)
    for i, (x,) in enumerate(loader):
        accumulating = (i + 1) % args.accumulate != 0
        with fabric.no_backward_sync(model, accumulating):
            with fabric.autocast():
                recon, mu, logvar = model(x, torch.randn(len(x), args.latent))
                loss, rec, kl = elbo(recon, x, mu, logvar, beta)
            fabric.backward(loss / args.accumulate)
        if not accumulating:
            fabric.clip_gradients(model, 50.0)
            optimizer.step()
            optimizer.zero_grad()
        if prof is not None:
            prof.step()
        if i % args.log_interval == 0:
            stats = fabric.all_reduce(torch.stack([loss, rec, kl]))
            fabric.print("epoch {} step {:3d} loss {:.3f} rec {:.3f} kl {:.3f}".format(epoch, i, *stats.tolist()))


@torch.no_grad()
def validate(fabric, module, loader, args):
    module.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for (x,) in loader:
        recon, _, _ = module(x, torch.zeros(len(x), args.latent))
        total += torch.tensor([F.mse_loss(recon, x, reduction="sum").item(), x.numel()], dtype=torch.float64)
    total = fabric.all_reduce(total, "sum")
    module.train()
    return (total[0] / total[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--accumulate", type=int, default=2)
    p.add_argument("--latent", type=int, default=6)
    p.add_argument("--beta", type=float, default=0.05)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--log-interval", type=int, default=16)
    args = p.parse_args()
    fabric = Fabric().launch()
    fabric.seed_everything(42)
    raw = VAE(latent=args.latent)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=args.lr)
    model, optimizer = fabric.setup(raw, optimizer, compile_backend="aot_eager")
    fabric.seed_everything(42, per_rank=True)
    train_loader = fabric.setup_dataloaders(DataLoader(manifold(2048, 1), batch_size=args.batch_size, shuffle=True,
                                                       drop_last=True))
    val_loader = fabric.setup_dataloaders(DataLoader(manifold(512, 2), batch_size=128))

    prof = None
    if fabric.is_global_zero:
        prof = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=8, warmup=2, active=4, repeat=1))
        prof.start()
    for epoch in range(args.epochs):
        train_one_epoch(fabric, model, optimizer, train_loader, epoch, args, prof)
        mse = validate(fabric, raw, val_loader, args)
        fabric.print(f"epoch {epoch} validation mse {mse:.4f}")
        fabric.save("vae.ckpt", {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})
    if prof is not None:
        prof.stop()
        os.makedirs("profile", exist_ok=True)
        with open("profile/table.txt", "w") as f:
            f.write(prof.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    fabric.teardown()


if __name__ == "__main__":
    main()
