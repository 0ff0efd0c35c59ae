"""Image classification with a smoothed-metric logger, EMA, repeated-augmentation sampler and a warmup chain."""
import argparse
import math
import os
from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler


class Smoothed:
    def __init__(self, window=20):
        self.recent = deque(maxlen=window)
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.recent.append(value)
        self.total += value * n
        self.count += n

    def synchronize(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        self.count, self.total = int(t[0]), t[1].item()

    @property
    def average(self):
        return self.total / max(self.count, 1)


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(Smoothed)

    def synchronize(self):
        for meter in self.meters.values():
            meter.synchronize()

    def __str__(self):
        return "  ".join(f"{k}: {m.average:.4f}" for k, m in self.meters.items())


class RepeatAugSampler(Sampler):
    """Each sample is shown `repeats` times per epoch, the copies falling on different ranks."""

    def __init__(self, dataset, rank, world, repeats=2, seed=0):
        self.dataset, self.rank, self.world = dataset, rank, world
        self.repeats, self.seed, self.epoch = repeats, seed, 0
        self.num_samples = int(math.ceil(len(dataset) * repeats / world))
        self.total_size = self.num_samples * world
        self.num_selected = len(dataset) // 64 * 64 // world

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=g).tolist()
        order = [i for i in order for _ in range(self.repeats)]
        order += order[:self.total_size - len(order)]
        return iter(order[self.rank:self.total_size:self.world][:self.num_selected])

    def __len__(self):
        return self.num_selected

    def set_epoch(self, epoch):
        self.epoch = epoch


class Blobs(Dataset):
    def __init__(self, n, seed, augment):
        g = torch.Generator().manual_seed(seed)
        base = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(1))
        self.y = torch.randint(0, 6, (n,), generator=g)
        self.x = base[self.y] + 1.2 * torch.randn(n, 3, 12, 12, generator=g)
        self.augment = augment

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.augment:
            x = x * (0.8 + 0.4 * torch.rand(1)) + 0.05 * torch.randn_like(x)
        return x, self.y[i]


class AveragedModel(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda avg, p, _: decay * avg + (1 - decay) * p, use_buffers=True)


def network():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 6))


def train_one_epoch(model, ema, criterion, optimizer, loader, epoch, args):
    model.train()
    logger = MetricLogger()
    for i, (image, target) in enumerate(loader):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.ema_steps == 0:
            ema.update_parameters(model)
            if epoch < args.warmup_epochs:
                ema.n_averaged.fill_(0)
        logger.meters["loss"].update(loss.item(), image.size(0))
    return logger


@torch.inference_mode()
def evaluate(model, criterion, loader, suffix=""):
    model.eval()
    logger = MetricLogger()
    processed = 0
    for image, target in loader:
        out = model(image)
        n = image.size(0)
        logger.meters["loss"].update(criterion(out, target).item(), n)
        logger.meters["acc1"].update((out.argmax(1) == target).float().mean().item() * 100, n)
        processed += n
    seen = torch.tensor(processed)
    dist.all_reduce(seen)
    if len(loader.dataset) != seen.item() and dist.get_rank() == 0:
        print(f"note: the dataset has {len(loader.dataset)} samples, {seen.item()} were evaluated")
    logger.synchronize()
    if dist.get_rank() == 0:
        print(f"Test{suffix}: {logger}", flush=True)
    return logger.meters["acc1"].average


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--ema-steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(50 + rank)

    train, test = Blobs(1000, 2, True), Blobs(400, 3, False)
    sampler = RepeatAugSampler(train, rank, world)
    test_sampler = DistributedSampler(test, shuffle=False)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    test_loader = DataLoader(test, batch_size=40, sampler=test_sampler)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(network()) if torch.cuda.is_available() else network()
    model = nn.parallel.DistributedDataParallel(model)
    plain = model.module
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    no_decay = [p for n, p in plain.named_parameters() if p.ndim < 2]
    decay = [p for n, p in plain.named_parameters() if p.ndim >= 2]
    optimizer = torch.optim.SGD([{"params": decay}, {"params": no_decay, "weight_decay": 0.0}],
                                lr=0.1, momentum=0.9, weight_decay=1e-4)
    main_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - args.warmup_epochs)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.warmup_epochs)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_schedule], milestones=[args.warmup_epochs])
    ema = AveragedModel(plain, decay=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        logger = train_one_epoch(model, ema, criterion, optimizer, loader, epoch, args)
        schedule.step()
        if rank == 0:
            print(f"Epoch {epoch} (rank 0) {logger}", flush=True)
        for buffer in plain.buffers():
            dist.broadcast(buffer, src=0)
        for buffer in ema.module.buffers():
            dist.broadcast(buffer, src=0)
        evaluate(plain, criterion, test_loader)
        evaluate(ema, criterion, test_loader, suffix=" EMA")
        if rank == 0:
            os.makedirs("ckpt", exist_ok=True)
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                     "lr_scheduler": schedule.state_dict(), "model_ema": ema.state_dict()}
            torch.save(state, f"ckpt/model_{epoch}.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
