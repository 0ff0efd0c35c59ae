"""Tiny flow-matching speech model with EMA weights and gradient accumulation."""
import copy
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    epochs: int = 3
    batch: int = 8
    grad_accumulation_steps: int = 4
    lr: float = 2e-3
    ema_decay: float = 0.98
    max_norm: float = 1.0


class MelFrames(Dataset):
    def __init__(self, n=256, dim=20):
        g = torch.Generator().manual_seed(631)
        base = torch.randn(4, dim, generator=g)
        kind = torch.randint(0, 4, (n,), generator=g)
        self.mel = base[kind] + 0.1 * torch.randn(n, dim, generator=g)
        self.text = torch.nn.functional.one_hot(kind, 4).float()

    def __len__(self):
        return len(self.mel)

    def __getitem__(self, i):
        return self.mel[i], self.text[i]


class Velocity(nn.Module):
    def __init__(self, dim=20, cond=4, width=96):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + cond + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, dim))

    def forward(self, x, t, text):
        return self.net(torch.cat([x, text, t], dim=1))


class EMA:
    def __init__(self, net, decay):
        self.model = copy.deepcopy(net).requires_grad_(False)
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, net):
        self.updates += 1
        for avg, p in zip(self.model.parameters(), net.parameters()):
            avg.lerp_(p, 1 - self.decay)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        torch.manual_seed(1)
        self.model = DDP(Velocity())
        self.ema = EMA(self.model.module, cfg.ema_decay)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        data = MelFrames()
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch_size=cfg.batch, sampler=self.sampler, drop_last=True)
        self.noise = torch.Generator().manual_seed(100 + self.rank)

    def loss(self, mel, text):
        x0 = torch.randn(mel.shape, generator=self.noise)
        t = torch.rand(len(mel), 1, generator=self.noise)
        pred = self.model((1 - t) * x0 + t * mel, t, text)
        return (pred - (mel - x0)).pow(2).mean()

    def train(self):
        global_step = 0
        accum = self.cfg.grad_accumulation_steps
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for i, (mel, text) in enumerate(self.loader):
                last = (i + 1) % accum == 0
                with nullcontext() if last else self.model.no_sync():
                    loss = self.loss(mel, text) / accum
                    loss.backward()
                total += torch.tensor([loss.item() * accum, 1.0])
                if last:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    global_step += 1
                self.ema.update(self.model.module)
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch} step {global_step} loss {(total[0] / total[1]).item():.4f} ema updates {self.ema.updates}")
        if self.rank == 0:
            torch.save({"ema": self.ema.model.state_dict(), "step": global_step}, "model_last.pt")


def main():
    dist.init_process_group("gloo")
    Trainer(Config()).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
