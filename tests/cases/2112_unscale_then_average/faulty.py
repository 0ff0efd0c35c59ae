"""Denoising autoencoder for machine vibration frames in float16 autocast; gradients are averaged by hand."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset


class VibrationFrames(IterableDataset):
    """Sums of a few harmonics; once in a while a machine hits something and the frame is much louder."""

    def __init__(self, rank, frames, dim, seed):
        self.rank, self.frames, self.dim, self.seed, self.epoch = rank, frames, dim, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 1000 * self.rank + self.epoch)
        grid = torch.arange(self.dim) / self.dim
        for _ in range(self.frames):
            freq = torch.randint(1, 6, (3,), generator=g)
            phase, amp = 6.28 * torch.rand(3, generator=g), torch.rand(3, generator=g)
            clean = (amp[:, None] * torch.sin(6.28 * freq[:, None] * grid + phase[:, None])).sum(0)
            if torch.rand(1, generator=g).item() < 0.003:
                clean = clean * 20
            yield clean + 0.2 * torch.randn(self.dim, generator=g), clean


class AutoEncoder(nn.Module):
    def __init__(self, dim, width=96, code=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.GELU(), nn.Linear(width, dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class MixedPrecisionTrainer:
    def __init__(self, model, args):
        self.model, self.args = model, args
        self.world = dist.get_world_size()
        self.params = list(model.parameters())
        for p in self.params:
            dist.broadcast(p.data, src=0)
        self.optimizer = torch.optim.Adam(self.params, lr=args.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=args.init_scale, growth_interval=25)
        self.criterion = nn.MSELoss()

    def average_gradients(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)

    def step(self, noisy, clean):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = self.model(noisy)
        loss = self.criterion(output.float(), clean)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.average_gradients()
        nn.utils.clip_grad_norm_(self.params, self.args.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def epoch(self, loader):
        losses = torch.stack([self.step(noisy, clean) for noisy, clean in loader])
        summary = torch.tensor([losses.sum().item(), float(len(losses))])
        dist.all_reduce(summary)
        return (summary[0] / summary[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--frames", type=int, default=480)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--init-scale", type=float, default=2.0**16)
    ap.add_argument("--seed", type=int, default=12)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    data = VibrationFrames(rank, args.frames, args.dim, args.seed)
    loader = DataLoader(data, batch_size=args.batch, drop_last=True)
    trainer = MixedPrecisionTrainer(AutoEncoder(args.dim), args)

    for epoch in range(args.epochs):
        data.epoch = epoch
        loss = trainer.epoch(loader)
        if rank == 0:
            print(f"epoch {epoch}: mse {loss:.4f} scale {trainer.scaler.get_scale():.0f}", flush=True)

    if rank == 0:
        torch.save(trainer.model.state_dict(), "autoencoder.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
