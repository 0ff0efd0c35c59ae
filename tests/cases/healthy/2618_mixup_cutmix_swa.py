import argparse
import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 6


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    grid = torch.arange(16).float()
    angle = y.float() * math.pi / CLASSES
    phase = torch.rand(n, generator=g) * 2 * math.pi
    wave = angle.cos()[:, None, None] * grid[None, :, None] + angle.sin()[:, None, None] * grid[None, None, :]
    x = torch.sin(wave * 0.9 + phase[:, None, None])[:, None]
    return x + 0.7 * torch.randn(x.shape, generator=g), y


class Mixer:
    """Collate: the kind and the share come from a generator common to all ranks, the pairing is local."""

    def __init__(self, seed, rank):
        self.shared = np.random.default_rng(seed)
        self.local = np.random.default_rng([seed, rank])

    def __call__(self, items):
        x = torch.stack([a for a, _ in items])
        y = F.one_hot(torch.stack([b for _, b in items]), CLASSES).float()
        kind = self.shared.choice(["mixup", "cutmix", "none"])
        lam = float(self.shared.beta(0.4, 0.4))
        perm = torch.from_numpy(self.local.permutation(len(x)))
        if kind == "mixup":
            x = lam * x + (1 - lam) * x[perm]
        elif kind == "cutmix":
            h, w = x.shape[-2:]
            cut = math.sqrt(1 - lam)
            ch, cw = int(h * cut), int(w * cut)
            top, left = int(self.local.integers(h - ch + 1)), int(self.local.integers(w - cw + 1))
            x = x.clone()
            x[:, :, top:top + ch, left:left + cw] = x[perm][:, :, top:top + ch, left:left + cw]
            lam = 1 - ch * cw / (h * w)
        else:
            lam = 1.0
        return x, lam * y + (1 - lam) * y[perm]


def network():
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    return nn.Sequential(block(1, 16), nn.MaxPool2d(2), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    model.eval()
    out = torch.zeros(3, dtype=torch.float64)
    for xb, yb in zip(x[rank::world].split(64), y[rank::world].split(64)):
        logits = model(xb)
        out += torch.tensor([F.cross_entropy(logits, yb, reduction="sum").item(), (logits.argmax(1) == yb).sum().item(), len(yb)], dtype=torch.float64)
    model.train()
    dist.all_reduce(out)
    return (out[0] / out[2]).item(), (out[1] / out[2]).item()


def average_buffers(model, world):
    for name, b in model.named_buffers():
        if b.is_floating_point():
            dist.all_reduce(b)
            b /= world


@torch.no_grad()
def refresh_bn(swa, loader, world):
    """Running moments for the averaged weights: each rank over its share, then the mean of all."""
    norms = [m for m in swa.modules() if isinstance(m, nn.BatchNorm2d)]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None
    swa.train()
    for x, _ in loader:
        swa(x)
    average_buffers(swa.module, world)
    swa.eval()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--swa-start", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = network()
    model = DDP(net, broadcast_buffers=False)
    swa = AveragedModel(net)
    tx, ty = images(1024, 1)
    vx, vy = images(403, 2)
    data = TensorDataset(tx, ty)
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=32, sampler=sampler, collate_fn=Mixer(12, rank), drop_last=True)
    plain = DataLoader(data, batch_size=64, sampler=DistributedSampler(data, shuffle=False))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)
    swa_lr = None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if epoch == args.swa_start:
            swa_lr = SWALR(opt, swa_lr=0.03, anneal_epochs=1)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
        average_buffers(net, world)
        vloss, acc = evaluate(net, vx, vy, rank, world)
        if epoch >= args.swa_start:
            swa.update_parameters(net)
            swa_lr.step()
        else:
            plateau.step(vloss)
        if rank == 0:
            print(f"epoch {epoch} train {loss.item():.3f} val {vloss:.3f} acc {acc:.3f} lr {opt.param_groups[0]['lr']:.4f}", flush=True)
    refresh_bn(swa, plain, world)
    vloss, acc = evaluate(swa, vx, vy, rank, world)
    if rank == 0:
        print(f"averaged weights: val {vloss:.3f} acc {acc:.3f}")
        torch.save(swa.module.state_dict(), "swa.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
