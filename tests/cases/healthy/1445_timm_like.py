"""Image classification with mixup, label smoothing, EMA, progressive resizing and a compiled model."""
import argparse
import copy
import logging
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

_logger = logging.getLogger("train")


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def reduced(self):
        t = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(t)
        return (t[0] / t[1]).item()


class Mixup:
    def __init__(self, alpha, smoothing, num_classes):
        self.beta, self.smoothing, self.num_classes = torch.distributions.Beta(alpha, alpha), smoothing, num_classes

    def __call__(self, x, y):
        lam = self.beta.sample().item()
        off = self.smoothing / self.num_classes
        hot = torch.full((len(y), self.num_classes), off).scatter_(1, y[:, None], 1 - self.smoothing + off)
        return lam * x + (1 - lam) * x.flip(0), lam * hot + (1 - lam) * hot.flip(0)


class ModelEma:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1 - self.decay) * m)


class Blobs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 5, (n,), generator=g)
        pattern = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        self.x = pattern[self.y] + torch.randn(n, 3, 16, 16, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def create_model():
    return nn.Sequential(OrderedDict(
        stem=nn.Conv2d(3, 16, 3, padding=1), norm1=nn.GroupNorm(4, 16), act1=nn.SiLU(),
        conv2=nn.Conv2d(16, 32, 3, stride=2, padding=1), norm2=nn.GroupNorm(4, 32), act2=nn.SiLU(),
        pool=nn.AdaptiveAvgPool2d(2), flat=nn.Flatten(), fc=nn.Linear(128, 5)))


def train_one_epoch(epoch, model, raw, loader, optimizer, mixup, ema, size):
    losses = AverageMeter()
    model.train()
    for x, y in loader:
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        x, target = mixup(F.interpolate(x, size=size, mode="bilinear", align_corners=False), y)
        loss = -(target * model(x).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        ema.update(raw)
        losses.update(loss.item(), len(x))
    return losses.reduced()


@torch.no_grad()
def validate(model, dataset, rank, world):
    top1 = AverageMeter()
    for i in range(rank, len(dataset), world):
        x, y = dataset[i]
        top1.update(float(model(x[None]).argmax() == y))
    return top1.reduced()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--sizes", type=int, nargs="+", default=[8, 12, 16])
    p.add_argument("--patience", type=int, default=3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    torch.manual_seed(42)
    raw = create_model()
    ema = ModelEma(raw, 0.95)
    model = torch.compile(NativeDDP(raw), backend="eager", dynamic=False)
    torch.manual_seed(42 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    train, val = Blobs(384, 1), Blobs(101, 2)
    sampler = DistributedSampler(train, seed=42)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    mixup, best, bad = Mixup(0.4, 0.1, 5), 0.0, 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        size = args.sizes[min(epoch * len(args.sizes) // args.epochs, len(args.sizes) - 1)]
        loss = train_one_epoch(epoch, model, raw, loader, optimizer, mixup, ema, size)
        top1 = validate(ema.module, val, rank, world)
        _logger.info("epoch %d size %d loss %.4f ema top1 %.3f", epoch, size, loss, top1)
        if top1 > best:
            best, bad = top1, 0
            if rank == 0:
                torch.save({"state_dict": raw.state_dict(), "ema": ema.module.state_dict(), "epoch": epoch}, "model_best.pth.tar")
        else:
            bad += 1
        if bad >= args.patience:
            _logger.info("stopping, best %.3f", best)
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
