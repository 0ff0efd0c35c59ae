"""Convolutional autoencoder for small pictures, with callbacks for progress and checkpoints."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn


def pictures(n, seed):
    """Sums of two soft discs."""
    g = torch.Generator().manual_seed(seed)
    ax = torch.arange(12.0)
    out = torch.zeros(n, 1, 12, 12)
    for _ in range(2):
        cy, cx = 2 + 8 * torch.rand(2, n, 1, 1, generator=g)
        out[:, 0] += torch.exp(-((ax.view(1, -1, 1) - cy) ** 2 + (ax.view(1, 1, -1) - cx) ** 2) / 4)
    return out


class AutoEncoder(nn.Module):
    def __init__(self, code=12):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(144, code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, 144), nn.ReLU(), nn.Unflatten(1, (16, 3, 3)),
            nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, stride=2),
        )  # fmt: skip

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Progress:
    def on_epoch_end(self, loop, epoch, loss):
        if loop.rank == 0:
            print(f"epoch {epoch}: mse {loss:.5f}", flush=True)


class ModelCheckpoint:
    """Keeps the last state and the best one."""

    def __init__(self, folder):
        self.folder, self.best = folder, float("inf")
        os.makedirs(folder, exist_ok=True)

    def on_epoch_end(self, loop, epoch, loss):
        state = {"model": loop.net.state_dict(), "opt": loop.opt.state_dict(), "epoch": epoch}
        torch.save(state, os.path.join(self.folder, "last.pt"))
        if loss < self.best:
            self.best = loss
            torch.save(state, os.path.join(self.folder, "best.pt"))


class Loop:
    def __init__(self, net, lr, callbacks):
        self.rank, self.world, self.net, self.callbacks = dist.get_rank(), dist.get_world_size(), net, callbacks
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        for p in net.parameters():
            dist.broadcast(p.detach(), src=0)

    def step(self, x):
        self.opt.zero_grad()
        loss = nn.functional.mse_loss(self.net(x), x)
        loss.backward()
        for p in self.net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.opt.step()
        return loss.detach()

    def run(self, data, epochs, batch):
        for epoch in range(epochs):
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))[self.rank :: self.world]
            losses = torch.stack([self.step(data[idx]) for idx in order.split(batch)]).mean()
            dist.all_reduce(losses)
            for cb in self.callbacks:
                cb.on_epoch_end(self, epoch, losses.item() / self.world)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Loop(AutoEncoder(), 3e-3, [Progress(), ModelCheckpoint("checkpoints")]).run(pictures(384, seed=3), epochs=7, batch=16)
    dist.destroy_process_group()
