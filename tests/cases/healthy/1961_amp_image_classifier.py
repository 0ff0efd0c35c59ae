"""Train a small CNN on 16x16 colour patches with DDP and bfloat16 autocast.

    torchrun --nproc-per-node 2 1961_amp_image_classifier.py --epochs 4
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32, help="per process")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--weight-decay", type=float, default=0.05)
    p.add_argument("--warmup-steps", type=int, default=8)
    p.add_argument("--label-smoothing", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--no-amp", action="store_true")
    return p.parse_args()


class Patches(Dataset):
    """Class-dependent gratings with noise; the train split is augmented."""

    def __init__(self, size, num_classes, seed, augment):
        g = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(num_classes, (size,), generator=g)
        yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        angle = self.targets.view(-1, 1, 1) * math.pi / num_classes
        phase = torch.rand(size, 1, 1, generator=g) * 2 * math.pi
        wave = torch.sin(0.9 * (xx * angle.cos() + yy * angle.sin()) + phase)
        self.images = wave.unsqueeze(1).repeat(1, 3, 1, 1) + 0.6 * torch.randn(size, 3, 16, 16, generator=g)
        self.augment = augment

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment:
            padded = F.pad(image, (2, 2, 2, 2))
            top, left = torch.randint(0, 5, (2,)).tolist()
            image = padded[:, top:top + 16, left:left + 16]
        return image, self.targets[i]


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(), nn.MaxPool2d(2))


def build_model(num_classes):
    return nn.Sequential(conv_block(3, 16), conv_block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Dropout(0.1), nn.Linear(32, num_classes))


def param_groups(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def average_bn_statistics(model, world_size):
    """Each rank keeps its own running statistics; agree on their mean before evaluating."""
    for name, buf in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buf)
            buf /= world_size


@torch.no_grad()
def evaluate(model, loader, use_amp):
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct, count
    for images, targets in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_amp):
            logits = model(images)
        logits = logits.float()
        totals[0] += F.cross_entropy(logits, targets, reduction="sum").double()
        totals[1] += (logits.argmax(1) == targets).sum()
        totals[2] += len(targets)
    dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    use_amp = not args.no_amp

    torch.manual_seed(args.seed)
    model = DDP(build_model(6))
    torch.manual_seed(args.seed + 1000 * (rank + 1))  # independent augmentation and dropout per process

    train_set = Patches(1280, 6, seed=1, augment=True)
    test_set = Patches(401, 6, seed=2, augment=False)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    # Every test image exactly once over all processes; shards may differ by one image.
    shard = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(shard, batch_size=64)

    optimizer = torch.optim.AdamW(param_groups(model, args.weight_decay), lr=args.lr)
    total_steps = args.epochs * len(train_loader)

    def lr_lambda(step):
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        t = (step - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * t))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        running = torch.zeros(())
        for images, targets in train_loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_amp):
                loss = criterion(model(images), targets)
            loss.backward()  # bfloat16 has float32's range: no GradScaler
            optimizer.step()
            scheduler.step()
            running += loss.detach().float()
        dist.all_reduce(running)
        train_loss = running.item() / (world_size * len(train_loader))

        average_bn_statistics(model.module, world_size)
        val_loss, val_acc = evaluate(model.module, test_loader, use_amp)
        if rank == 0:
            print(f"epoch {epoch}: train {train_loss:.4f} val {val_loss:.4f} acc {val_acc:.3f} "
                  f"({time.perf_counter() - start:.1f}s)", flush=True)
            if val_acc > best:
                torch.save(model.module.state_dict(), "best.pt.tmp")
                os.replace("best.pt.tmp", "best.pt")
        best = max(best, val_acc)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
