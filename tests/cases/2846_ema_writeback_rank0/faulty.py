"""Sequence autoencoder with an exponential moving average that is fed back into the online weights now and then."""
import copy
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Settings:
    steps: int = 150
    batch: int = 32
    lr: float = 2e-3
    beta: float = 0.98
    ema_every: int = 2
    update_model_with_ema_every: int = 50
    warmup: int = 20


class EMA:
    def __init__(self, model, beta, update_every, warmup, update_model_with_ema_every=None):
        self.online = model
        self.shadow = copy.deepcopy(model).requires_grad_(False).eval()
        self.beta = beta
        self.update_every = update_every
        self.warmup = warmup
        self.write_back = update_model_with_ema_every
        self.step = 0

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.step % self.update_every == 0:
            beta = 0.0 if self.step <= self.warmup else self.beta
            for slow, fast in zip(self.shadow.parameters(), self.online.parameters()):
                slow.lerp_(fast, 1 - beta)
        if self.write_back and self.step % self.write_back == 0:
            for slow, fast in zip(self.shadow.parameters(), self.online.parameters()):
                fast.copy_(slow)


class SeqAutoencoder(nn.Module):
    def __init__(self, feat=12, hidden=48):
        super().__init__()
        self.encoder = nn.GRU(feat, hidden, batch_first=True)
        self.code = nn.Linear(hidden, 8)
        self.expand = nn.Linear(8, hidden)
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, feat)

    def forward(self, x):
        _, h = self.encoder(x)
        z = self.expand(self.code(h[-1])).unsqueeze(1).expand(-1, x.size(1), -1)
        y, _ = self.decoder(z.contiguous())
        return self.out(y)


def sample_batch(n, length=16, feat=12):
    phase = torch.rand(n, 1, feat) * 6.28
    freq = 0.2 + 0.3 * torch.rand(n, 1, 1)
    t = torch.arange(length).view(1, -1, 1)
    return torch.sin(freq * t + phase * 0.2)


def evaluate(model, held_out, rank, world):
    with torch.no_grad():
        mine = held_out[rank::world]
        err = (model(mine) - mine).pow(2)
        stat = torch.tensor([err.sum().item(), err.numel()], dtype=torch.float64)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def run(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(500)
    held_out = sample_batch(128)
    model = DDP(SeqAutoencoder())
    torch.manual_seed(500 + 17 * (rank + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    ema = EMA(model.module, cfg.beta, cfg.ema_every, cfg.warmup, cfg.update_model_with_ema_every)

    for step in range(1, cfg.steps + 1):
        x = sample_batch(cfg.batch)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            ema.update()
        if step % 30 == 0:
            score = evaluate(model.module, held_out, rank, world)
            if rank == 0:
                print(f"step {step} held-out mse {score:.4f}", flush=True)

    if rank == 0:
        os.makedirs("weights", exist_ok=True)
        torch.save({"ema": ema.shadow.state_dict(), "online": model.module.state_dict()}, "weights/final.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(Settings())
    dist.destroy_process_group()
