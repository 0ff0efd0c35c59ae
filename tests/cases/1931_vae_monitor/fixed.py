"""Variational autoencoder with callbacks; one of them keeps an eye on the weights."""
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class VAE(nn.Module):
    def __init__(self, inputs=64, width=480, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.moments = nn.Linear(width, 2 * latent)
        self.dec = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, inputs))

    def forward(self, x):
        mu, logvar = self.moments(self.enc(x)).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


class Callback:
    def on_start(self, trainer):
        pass

    def on_step(self, trainer, step, loss):
        pass

    def on_end(self, trainer):
        pass


class LossLog(Callback):
    def __init__(self, every):
        self.every, self.total = every, 0.0

    def on_step(self, trainer, step, loss):
        self.total += loss.item()
        if step % self.every == 0:
            mean = torch.tensor(self.total / self.every)
            dist.all_reduce(mean)
            trainer.say(f"step {step}: loss {mean.item() / trainer.world:.4f}")
            self.total = 0.0


class WeightMonitor(Callback):
    """Spectral norm, condition number and effective rank of every matrix, as a line of JSON."""

    def __init__(self, path, every):
        self.path, self.every = path, every

    def on_start(self, trainer):
        self.file = open(self.path, "w") if trainer.rank == 0 else None

    @torch.no_grad()
    def on_step(self, trainer, step, loss):
        if self.file is None or step % self.every:
            return
        row = {"step": step}
        for name, p in trainer.model.module.named_parameters():
            if p.ndim == 2:
                s = torch.linalg.svdvals(p)
                q = s / s.sum()
                row[name] = [s[0].item(), (s[0] / s[-1]).item(), (-(q * q.log()).sum()).exp().item()]
        self.file.write(json.dumps(row) + "\n")

    def on_end(self, trainer):
        if self.file is not None:
            self.file.close()


class Trainer:
    def __init__(self, net, callbacks, lr=1e-3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(net)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.callbacks = callbacks

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def fit(self, batches):
        for c in self.callbacks:
            c.on_start(self)
        for step, x in enumerate(batches, start=1):
            recon, mu, logvar = self.model(x)
            kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
            loss = F.mse_loss(recon, x, reduction="none").sum(1).mean() + 0.1 * kl
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            for c in self.callbacks:
                c.on_step(self, step, loss.detach())
        for c in self.callbacks:
            c.on_end(self)


def waves(steps, batch, seed):
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(0, 6.28, 64)
    for _ in range(steps):
        f = 1 + 2 * torch.rand(batch, 1, generator=g)
        p = 6.28 * torch.rand(batch, 1, generator=g)
        yield torch.sin(f * grid + p)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = VAE()
    torch.manual_seed(1 + dist.get_rank())
    trainer = Trainer(net, [LossLog(every=20), WeightMonitor("weights.jsonl", every=30)])
    trainer.fit(waves(60, 64, seed=300 + trainer.rank))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
