"""Mixed-precision training with clipping, callbacks for logging and saving."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n=480, arms=3):
    g = torch.Generator().manual_seed(27)
    y = torch.randint(0, arms, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + 6.283 * y / arms + 0.15 * torch.randn(n, generator=g)
    x = torch.stack([r * a.cos(), r * a.sin()], 1)
    return TensorDataset(torch.cat([x, torch.sin(3 * x), torch.cos(3 * x)], 1), y)


class Log:
    def __init__(self):
        self.start = time.time()

    def epoch_end(self, trainer, epoch, loss):
        print(f"epoch {epoch}: loss {loss:.4f} ({time.time() - self.start:.1f} s)", flush=True)


class Save:
    def epoch_end(self, trainer, epoch, loss):
        torch.save({"epoch": epoch, "model": trainer.model.module.state_dict()}, "spirals.pt")


class Trainer:
    def __init__(self, model, lr, max_norm, callbacks):
        self.model, self.max_norm, self.callbacks = model, max_norm, callbacks
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.detach()

    def fit(self, loader, sampler, epochs):
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            mean = sum(self.step(x, y) for x, y in loader) / len(loader)
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                for callback in self.callbacks:
                    callback.epoch_end(self, epoch, mean.item() / dist.get_world_size())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = spirals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    Trainer(DDP(net), args.lr, args.max_norm, [Log(), Save()]).fit(loader, sampler, args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
