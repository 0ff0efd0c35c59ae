"""MLP-Mixer classifier: learning-rate range test first, then one-cycle training. DDP under torch.compile."""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PATCHES, PATCH_DIM, CLASSES = 16, 12, 6


def make_split(n, seed):
    """Each class puts its own pattern at a class-dependent pair of patches."""
    patterns = torch.randn(CLASSES, PATCH_DIM, generator=torch.Generator().manual_seed(50))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    x = torch.randn(n, PATCHES, PATCH_DIM, generator=g)
    rows = torch.arange(n)
    for k in range(2):
        place = (y * 2 + k * 5 + torch.randint(0, 3, (n,), generator=g)) % PATCHES
        x[rows, place] += 0.9 * patterns[y]
    return TensorDataset(x, y)


class MixerBlock(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm_t, self.norm_c = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(PATCHES, hidden), nn.GELU(), nn.Linear(hidden, PATCHES))
        self.channels = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm_t(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_c(x))


class Mixer(nn.Module):
    def __init__(self, dim=32, depth=3):
        super().__init__()
        self.embed = nn.Linear(PATCH_DIM, dim)
        self.blocks = nn.Sequential(*(MixerBlock(dim, 2 * dim) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Flatten(), nn.Linear(PATCHES * dim, CLASSES))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def forever(loader, sampler, first_epoch):
    epoch = first_epoch
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def range_test(model, raw, make_optimizer, stream, criterion, low, high, steps):
    """Raise the rate from low to high and watch the smoothed global loss; weights are put back afterwards.

    The curve is made of all-reduced losses, so all processes leave the loop together and choose the same rate.
    """
    saved = copy.deepcopy(raw.state_dict())
    optimizer = make_optimizer(low)
    smooth, best, curve = 0.0, math.inf, []
    for step in range(steps):
        lr = low * (high / low) ** (step / (steps - 1))
        optimizer.param_groups[0]["lr"] = lr
        x, y = next(stream)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        dist.all_reduce(value)
        smooth = 0.8 * smooth + 0.2 * value.item() / dist.get_world_size()
        debiased = smooth / (1 - 0.8 ** (step + 1))
        best = min(best, debiased)
        curve.append((lr, debiased))
        if step > 8 and not debiased < 2.5 * best:  # also true for NaN
            break
    raw.load_state_dict(saved)
    at_minimum = min(curve, key=lambda point: point[1])[0]
    return at_minimum / 4, len(curve)


@torch.no_grad()
def evaluate(raw, dataset, rank, world):
    raw.eval()
    x, y = (t[rank::world] for t in dataset.tensors)
    count = torch.tensor([(raw(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(count)
    raw.train()
    return count[0].item() / count[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--backend", default="eager", help="torch.compile backend")
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--steps", type=int, default=120)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    raw = Mixer()
    model = torch.compile(DDP(raw), backend=args.backend)  # `raw` stays at hand for evaluation and saving
    criterion = nn.CrossEntropyLoss()

    train, test = make_split(1280, seed=1), make_split(405, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=6, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)

    def make_optimizer(lr):
        return torch.optim.AdamW(raw.parameters(), lr=lr, weight_decay=0.05)

    lr, tried = range_test(model, raw, make_optimizer, forever(loader, sampler, 1000), criterion, 1e-5, 1.0, 40)
    if rank == 0:
        print(f"range test: {tried} steps, chosen rate {lr:.2e}", flush=True)

    optimizer = make_optimizer(lr)  # new moments; the weights are the initial ones again
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=args.steps, pct_start=0.2)
    stream, total = forever(loader, sampler, 0), torch.zeros(())
    for step in range(1, args.steps + 1):
        x, y = next(stream)
        loss = criterion(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
        if step % 30 == 0:
            dist.all_reduce(total)
            accuracy = evaluate(raw, test, rank, world)
            if rank == 0:
                print(f"step {step} loss {total.item() / (30 * world):.4f} test accuracy {accuracy:.3f}", flush=True)
            total.zero_()

    if rank == 0:
        torch.save(raw.state_dict(), "mixer.pt.tmp")
        os.replace("mixer.pt.tmp", "mixer.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
