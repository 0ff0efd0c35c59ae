"""Mixed precision with a gradient scaler, clipping and accumulation."""
import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n=768):
    g = torch.Generator().manual_seed(21)
    y = torch.randint(0, 2, (n,), generator=g)
    r = torch.rand(n, generator=g) * 2 + 0.2
    angle = 2 * r + 3.14 * y
    x = torch.stack([r * angle.cos(), r * angle.sin()], 1)
    return TensorDataset(x + 0.05 * torch.randn(n, 2, generator=g), y)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))


def train_epoch(model, loader, opt, scaler, args):
    last_loss = 0.0
    for i, (x, y) in enumerate(loader):
        update = (i + 1) % args.accum == 0
        with contextlib.nullcontext() if update else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x).float(), y)
            scaler.scale(loss / args.accum).backward()
        if update:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        last_loss = loss.item()
    return last_loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 48), *[Residual(48) for _ in range(3)], nn.Linear(48, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu")
    data = spirals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, opt, scaler, args)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f} scale {scaler.get_scale():.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
