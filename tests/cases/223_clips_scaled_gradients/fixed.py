"""Mixed precision segmentation of 1-d traces with loss scaling and gradient clipping."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class TrainConfig:
    epochs: int = 3
    batch_size: int = 12
    lr: float = 3e-2
    clip_norm: float = 0.5
    init_scale: float = 4096.0


def traces(n, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(n, 32)
    for i in range(n):
        start = int(torch.randint(0, 24, (1,), generator=g))
        mask[i, start : start + 8] = 1
    signal = mask * 1.5 + 0.5 * torch.randn(n, 32, generator=g)
    return TensorDataset(signal.unsqueeze(1), mask)


class UNet1d(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.down = nn.Conv1d(1, c, 5, stride=2, padding=2)
        self.mid = nn.Conv1d(c, c, 5, padding=2)
        self.up = nn.ConvTranspose1d(c, c, 4, stride=2, padding=1)
        self.out = nn.Conv1d(c + 1, 1, 1)

    def forward(self, x):
        h = F.relu(self.mid(F.relu(self.down(x))))
        return self.out(torch.cat([F.relu(self.up(h)), x], 1)).squeeze(1)


class AmpTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(17)
        self.model = DistributedDataParallel(UNet1d())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=0.9)
        self.scaler = GradScaler("cpu", init_scale=cfg.init_scale)

    def train_step(self, x, mask):
        self.optimizer.zero_grad(set_to_none=True)
        with autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(x)
        loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def fit(self, dataset):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, self.cfg.batch_size, sampler=sampler)
        for epoch in range(self.cfg.epochs):
            sampler.set_epoch(epoch)
            losses = torch.stack([self.train_step(*batch) for batch in loader])
            mean = losses.mean()
            dist.all_reduce(mean)
            if int(os.environ["RANK"]) == 0:
                print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}, scale {self.scaler.get_scale():.0f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    AmpTrainer(TrainConfig()).fit(traces(312, 4))
    dist.destroy_process_group()
