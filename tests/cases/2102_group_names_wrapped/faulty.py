"""Fine-tune a small convolutional backbone that was trained on another task; the new head learns faster."""
import dataclasses
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class Config:
    head_lr: float = 3e-2
    backbone_mult: float = 0.05
    weight_decay: float = 1e-4
    batch_size: int = 24
    epochs: int = 5
    samples: int = 480
    seed: int = 11


class Shapes(Dataset):
    """Bright bars at one of four angles over noise."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = 0.6 * torch.randn(n, 1, 20, 20, generator=g)
        line = torch.arange(20)
        for i, label in enumerate(self.y.tolist()):
            k = int(torch.randint(4, 16, (1,), generator=g))
            if label == 0:
                self.x[i, 0, k, :] += 1.5
            elif label == 1:
                self.x[i, 0, :, k] += 1.5
            elif label == 2:
                self.x[i, 0, line, line] += 1.5
            else:
                self.x[i, 0, line, 19 - line] += 1.5

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Classifier(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(24 * 16, 48), nn.ReLU(), nn.Linear(48, classes))

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrained_backbone(seed):
    """Stands for the checkpoint that one would download."""
    g = torch.Generator().manual_seed(seed)
    state = Classifier().backbone.state_dict()
    return {k: v if v.dim() == 1 else torch.randn(v.shape, generator=g) * (2.0 / v[0].numel()) ** 0.5 for k, v in state.items()}


def param_groups(model, cfg):
    backbone, decay, no_decay = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if name.startswith("backbone."):
            backbone.append(p)
        elif p.dim() == 1:
            no_decay.append(p)
        else:
            decay.append(p)
    return [
        {"params": backbone, "lr": cfg.head_lr * cfg.backbone_mult, "weight_decay": cfg.weight_decay},
        {"params": decay, "lr": cfg.head_lr, "weight_decay": cfg.weight_decay},
        {"params": no_decay, "lr": cfg.head_lr, "weight_decay": 0.0},
    ]


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(2)
    for x, y in loader:
        stats += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed)

    model = Classifier()
    model.backbone.load_state_dict(pretrained_backbone(cfg.seed))
    model = DDP(model)
    optimizer = torch.optim.SGD(param_groups(model, cfg), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg.epochs)

    train, val = Shapes(cfg.samples, 1), Shapes(120, 2)
    sampler = DistributedSampler(train, seed=cfg.seed, drop_last=True)
    loader = DataLoader(train, batch_size=cfg.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, batch_size=30, sampler=DistributedSampler(val, shuffle=False))

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)
        acc = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f} val acc {acc:.3f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "classifier.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
