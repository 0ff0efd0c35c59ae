"""Contrastive training of two small towers on paired views, with a Trainer and callbacks."""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    pairs: int = 512
    batch: int = 32
    epochs: int = 12
    lr: float = 1e-3
    scale_lr: float = 1e-2
    hold_scale: int = 16  # the temperature is kept at its start for so many steps
    seed: int = 0


class Pairs(Dataset):
    """Two linear views, of different width, of one hidden cause."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(8)
        cause = torch.randn(n, 12, generator=g)
        self.left = torch.tanh(cause @ torch.randn(12, 40, generator=g)) + 0.3 * torch.randn(n, 40, generator=g)
        self.right = torch.tanh(cause @ torch.randn(12, 28, generator=g)) + 0.3 * torch.randn(n, 28, generator=g)

    def __len__(self):
        return len(self.left)

    def __getitem__(self, i):
        return self.left[i], self.right[i]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 32))
        self.right = nn.Sequential(nn.Linear(28, 128), nn.ReLU(), nn.Linear(128, 32))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, a, b):
        a, b = F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1)
        return self.logit_scale.exp() * a @ b.T


class ScaleWarmup:
    def __init__(self, hold, lr):
        self.hold, self.lr = hold, lr

    def on_step(self, trainer):
        trainer.net.logit_scale.requires_grad_(trainer.step >= self.hold)

    def on_epoch(self, trainer, mean_loss):
        pass


class Progress:
    def on_step(self, trainer):
        pass

    def on_epoch(self, trainer, mean_loss):
        if dist.get_rank() == 0:
            scale = trainer.net.logit_scale.exp().item()
            print(f"step {trainer.step:4d}  loss {mean_loss:.4f}  scale {scale:.3f}", flush=True)


class Trainer:
    def __init__(self, cfg, callbacks):
        self.cfg, self.callbacks, self.step = cfg, callbacks, 0
        torch.manual_seed(cfg.seed)
        self.net = TwoTowers()
        towers = [p for name, p in self.net.named_parameters() if name != "logit_scale"]
        self.opt = torch.optim.AdamW([{"params": towers}, {"params": [self.net.logit_scale], "lr": cfg.scale_lr, "weight_decay": 0.0}], lr=cfg.lr)
        self.emit("on_step")
        self.model = DDP(self.net)
        data = Pairs(cfg.pairs)
        self.sampler = DistributedSampler(data, seed=cfg.seed)
        self.loader = DataLoader(data, cfg.batch, sampler=self.sampler, drop_last=True)

    def emit(self, event, *values):
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)

    def train_batch(self, a, b):
        logits = self.model(a, b)
        target = torch.arange(len(a))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.step += 1
        self.emit("on_step")
        return loss.detach()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            mean = torch.stack([self.train_batch(a, b) for a, b in self.loader]).mean()
            dist.all_reduce(mean)
            self.emit("on_epoch", mean.item() / dist.get_world_size())
        with torch.no_grad():
            self.net.logit_scale.clamp_(max=math.log(100.0))


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    trainer = Trainer(cfg, [ScaleWarmup(cfg.hold_scale, cfg.scale_lr), Progress()])
    trainer.fit()
    if dist.get_rank() == 0:
        torch.save({"model": trainer.net.state_dict(), "step": trainer.step}, "towers.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
