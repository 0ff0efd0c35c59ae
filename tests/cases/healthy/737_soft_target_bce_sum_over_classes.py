"""Multi-label training as in asymmetric-loss code: per-sample loss is a sum over classes, the batch is averaged; CutMix, model EMA, OneCycle."""
import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AsymmetricLoss(nn.Module):
    def __init__(self, gamma_neg=2, gamma_pos=0, clip=0.05, eps=1e-8):
        super().__init__()
        self.gn, self.gp, self.clip, self.eps = gamma_neg, gamma_pos, clip, eps

    def forward(self, x, y):
        p = torch.sigmoid(x)
        q = (1 - p + self.clip).clamp(max=1)
        loss = y * p.clamp(min=self.eps).log() + (1 - y) * q.clamp(min=self.eps).log()
        pt = p * y + q * (1 - y)
        with torch.no_grad():
            w = (1 - pt).pow(self.gp * y + self.gn * (1 - y))
        return -(loss * w).sum() / len(x)


class ModelEma:
    def __init__(self, model, decay=0.95):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1 - self.decay) * m if e.is_floating_point() else m)


def cutmix(x, y, rng):
    lam = rng.beta(1.0, 1.0)
    h = int(round(x.size(2) * np.sqrt(1 - lam)))
    i, j = rng.integers(0, x.size(2) - h + 1), rng.integers(0, x.size(3) - h + 1)
    perm = torch.from_numpy(rng.permutation(len(x)))
    x = x.clone()
    x[:, :, i : i + h, j : j + h] = x[perm, :, i : i + h, j : j + h]
    lam = 1 - h * h / (x.size(2) * x.size(3))
    return x, lam * y + (1 - lam) * y[perm]


def scenes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, 6, generator=g) < 0.3).float()
    stamp = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.einsum("nc,cihw->nihw", y, stamp) + 0.4 * torch.randn(n, 1, 8, 8, generator=g), y)


def mean_ap(scores, y):
    out = []
    for c in range(y.size(1)):
        t = y[scores[:, c].argsort(descending=True), c]
        if t.sum() > 0:
            out.append(((t.cumsum(0) / torch.arange(1, len(t) + 1)) * t).sum() / t.sum())
    return torch.stack(out).mean().item()


def main(epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(50)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 6))
    model = DDP(net)
    ema = ModelEma(net)
    rng = np.random.default_rng(50 + rank)
    train, valid = scenes(384, 1), scenes(100, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
    criterion = AsymmetricLoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=4e-3, steps_per_epoch=len(loader), epochs=epochs, pct_start=0.2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, y = cutmix(x, y, rng)
            loss = criterion(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            ema.update(net)
        net.eval()
        if rank == 0:
            with torch.no_grad():
                x, y = valid.tensors
                print(f"epoch {epoch}: mAP regular {mean_ap(net(x), y):.4f} ema {mean_ap(ema.module(x), y):.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
