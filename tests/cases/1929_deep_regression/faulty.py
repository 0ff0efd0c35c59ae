"""A deep narrow residual network learns the end state of a damped pendulum."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Pendulum(IterableDataset):
    """Start angle, speed, damping and length -> angle and speed after one second."""

    def __init__(self, batches, batch, seed):
        self.batches, self.batch, self.seed = batches, batch, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.batches):
            start = torch.rand(self.batch, 4, generator=g)
            angle, speed = 2 * start[:, 0] - 1, 2 * start[:, 1] - 1
            damping, length = 0.5 * start[:, 2], 0.5 + start[:, 3]
            for _ in range(20):
                speed = speed - 0.05 * (9.81 / length * torch.sin(angle) + damping * speed)
                angle = angle + 0.05 * speed
            yield start, torch.stack([angle, speed / 3], dim=1)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(self.norm(x))))


def make_net(width, depth):
    return nn.Sequential(nn.Linear(4, width), *[Residual(width) for _ in range(depth)], nn.Linear(width, 2))


def sync_weights(module, src=0):
    for p in module.parameters():
        dist.broadcast(p.data, src)


class Clock:
    def __init__(self):
        self.t = time.perf_counter()

    def lap(self):
        now = time.perf_counter()
        self.t, spent = now, now - self.t
        return spent


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batches", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--width", type=int, default=24)
    ap.add_argument("--depth", type=int, default=12)
    ap.add_argument("--log-every", type=int, default=15)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = make_net(args.width, args.depth)
    sync_weights(net)
    model = DistributedDataParallel(net)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DataLoader(Pendulum(args.batches, args.batch, seed=1000 + rank), batch_size=None)

    clock, window = Clock(), torch.zeros(())
    for step, (x, y) in enumerate(loader, start=1):
        loss = nn.functional.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sync_weights(net)
        window += loss.detach()
        if step % args.log_every == 0:
            dist.all_reduce(window)
            if rank == 0:
                rate = args.log_every / clock.lap()
                print(f"step {step:3d}  loss {window.item() / world / args.log_every:.4f}  {rate:.1f} steps/s", flush=True)
            window.zero_()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
