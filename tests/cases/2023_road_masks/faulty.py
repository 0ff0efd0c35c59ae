"""Road segmentation on drawn tiles, step-driven loop over an endless generator, validation every few steps."""
import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Options:
    steps: int = 60
    validate_every: int = 12
    batch: int = 12
    size: int = 32
    lr: float = 3e-3
    dropout: float = 0.2


def draw_tiles(count, size, gen):
    """Straight roads of random slope on a noisy ground."""
    grid = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    angle = torch.rand(count, generator=gen) * 3.14159
    shift = torch.rand(count, generator=gen) - 0.5
    distance = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None] - shift[:, None, None]
    mask = (distance.abs() < 0.18).float()
    noise = torch.randn(count, 3, size, size, generator=gen)
    tint = torch.tensor([0.7, 0.5, -0.4])[None, :, None, None]
    return mask[:, None] * tint + 0.8 * noise, mask[:, None]


def tile_stream(options, rank):
    gen = torch.Generator().manual_seed(900 + rank)
    while True:
        yield draw_tiles(options.batch, options.size, gen)


def block(inside, outside, dropout):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(), nn.Dropout2d(dropout))


class SmallUNet(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.down1, self.down2 = block(3, 16, dropout), block(16, 32, dropout)
        self.up = block(48, 16, dropout)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        return self.out(self.up(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)))


@contextlib.contextmanager
def inference(model):
    """Evaluation mode without gradients; afterwards the model is put back into the mode it was in."""
    model.eval()
    before = model.training
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(before)


def dice_score(model, tiles, masks, batch):
    overlap = torch.zeros(2)
    with inference(model) as net:
        for i in range(0, len(tiles), batch):
            guess = (net(tiles[i : i + batch]) > 0).float()
            truth = masks[i : i + batch]
            overlap += torch.stack([2 * (guess * truth).sum(), guess.sum() + truth.sum()])
    dist.all_reduce(overlap)
    return (overlap[0] / overlap[1]).item()


def main():
    options = Options()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = DistributedDataParallel(SmallUNet(options.dropout))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    torch.manual_seed(100 + rank)

    tiles, masks = draw_tiles(48, options.size, torch.Generator().manual_seed(3))
    tiles, masks = tiles[rank::world], masks[rank::world]
    model.train()
    stream = tile_stream(options, rank)
    for step in range(1, options.steps + 1):
        images, targets = next(stream)
        loss = F.binary_cross_entropy_with_logits(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % options.validate_every == 0:
            dice = dice_score(model.module, tiles, masks, options.batch)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item() / world:.4f}  dice {dice:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
