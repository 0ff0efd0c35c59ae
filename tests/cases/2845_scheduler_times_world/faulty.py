"""Point-cloud part regressor trained for a fixed number of optimizer updates."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class PreparedScheduler:
    """Steps the wrapped scheduler only when the optimizer really stepped."""

    def __init__(self, scheduler, accumulation, repeat=1):
        self.scheduler = scheduler
        self.accumulation = accumulation
        self.repeat = repeat
        self.calls = 0

    def step(self):
        self.calls += 1
        if self.calls % self.accumulation:
            return
        for _ in range(self.repeat):
            self.scheduler.step()

    def last_lr(self):
        return self.scheduler.get_last_lr()[0]


class PointNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, cloud):
        return self.head(self.point(cloud).amax(dim=1))


def make_clouds(n, seed):
    g = torch.Generator().manual_seed(seed)
    scale = 0.5 + torch.rand(n, 3, generator=g)
    cloud = (torch.rand(n, 64, 3, generator=g) - 0.5) * scale.unsqueeze(1)
    return TensorDataset(cloud, scale)


def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=120)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)

    data = make_clouds(1280, seed=4)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True, seed=8)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(PointNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / args.max_steps)))
    scheduler = PreparedScheduler(cosine, args.accumulation, repeat=world)

    batches = cycle(loader, sampler)
    model.train()
    window = torch.zeros(1)
    for update in range(args.max_steps):
        optimizer.zero_grad()
        for micro in range(args.accumulation):
            cloud, target = next(batches)
            model.require_backward_grad_sync = micro == args.accumulation - 1
            loss = nn.functional.smooth_l1_loss(model(cloud), target) / args.accumulation
            loss.backward()
            window += loss.detach()
            if micro == args.accumulation - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            scheduler.step()
        if (update + 1) % 20 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"update {update + 1} loss {window.item() / 20 / world:.5f} lr {scheduler.last_lr():.2e}", flush=True)
            window.zero_()

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "args": vars(args)}, "pointnet.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
