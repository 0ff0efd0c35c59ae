"""Denoising autoencoder for small glyphs. Rank 0 writes a picture of some reconstructions now and then."""
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Options:
    glyphs: int = 512
    batch: int = 32
    epochs: int = 5
    lr: float = 2e-3
    preview_every: int = 4
    seed: int = 3


class Glyphs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        strokes = torch.zeros(n, 16, 16)
        for _ in range(3):
            at, flip = torch.randint(2, 14, (n,), generator=g), torch.rand(n, generator=g) < 0.5
            rows = torch.zeros(n, 16, 16)
            rows[torch.arange(n), at] = 1
            strokes = torch.maximum(strokes, torch.where(flip.view(-1, 1, 1), rows, rows.transpose(1, 2)))
        self.clean = strokes.unsqueeze(1)
        self.noisy = (self.clean + 0.5 * torch.randn(self.clean.shape, generator=g)).clamp(-1, 2)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.noisy[i], self.clean[i]


class AutoEncoder(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, c, 3, 2, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU(), nn.Dropout2d(0.1),
            nn.Conv2d(c, 2 * c, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU(),
        )
        self.decode = nn.Sequential(nn.ConvTranspose2d(2 * c, c, 2, 2), nn.ReLU(), nn.ConvTranspose2d(c, 1, 2, 2))

    def forward(self, x):
        return self.decode(self.encode(x))


class Preview:
    """Saves the network's view of a few fixed glyphs."""

    def __init__(self, glyphs, every):
        self.every = every
        self.noisy = torch.stack([glyphs[i][0] for i in range(6)])

    def after_step(self, run):
        if run.rank == 0 and run.step % self.every == 0:
            net = run.model.module
            net.eval()
            with torch.no_grad():
                seen = net(self.noisy).sigmoid()
            np.save("preview.npy", torch.cat([self.noisy, seen], 3).numpy())


class Run:
    def __init__(self, opts):
        self.opts, self.rank, self.step = opts, dist.get_rank(), 0
        torch.manual_seed(opts.seed)
        train, val = Glyphs(opts.glyphs, 1), Glyphs(128, 2)
        self.sampler = DistributedSampler(train, seed=opts.seed)
        self.train = DataLoader(train, opts.batch, sampler=self.sampler, drop_last=True)
        self.val = DataLoader(val, opts.batch, sampler=DistributedSampler(val, shuffle=False))
        self.model = DDP(AutoEncoder())
        torch.manual_seed(opts.seed + self.rank)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=opts.lr)
        self.criterion = nn.BCEWithLogitsLoss()
        self.hooks = [Preview(val, opts.preview_every)]

    def epoch(self, number):
        self.sampler.set_epoch(number)
        self.model.train()
        total = torch.zeros(1)
        for noisy, clean in self.train:
            loss = self.criterion(self.model(noisy), clean)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            self.step += 1
            total += loss.detach()
            for hook in self.hooks:
                hook.after_step(self)
        return total / len(self.train)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = torch.zeros(1)
        for noisy, clean in self.val:
            total += self.criterion(self.model.module(noisy), clean)
        return total / len(self.val)


def main():
    dist.init_process_group("gloo")
    opts = Options()
    run = Run(opts)
    for number in range(opts.epochs):
        both = torch.cat([run.epoch(number), run.validate()])
        dist.all_reduce(both)
        train, val = (both / dist.get_world_size()).tolist()
        if run.rank == 0:
            print(f"epoch {number}: train {train:.4f}  val {val:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
