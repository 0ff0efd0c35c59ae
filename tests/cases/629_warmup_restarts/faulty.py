"""Character-count transformer; trains in two sittings (stop after 3 epochs, resume)."""
import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def learning_rate(step, base, warmup, total):
    if step < warmup:
        return base * (step + 1) / warmup
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class Counter(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.embed = nn.Embedding(10, d)
        self.enc = nn.TransformerEncoderLayer(d, 3, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.enc(self.embed(x)).sum(1)).squeeze(1)


def digits(n=256):
    x = torch.randint(0, 10, (n, 8), generator=torch.Generator().manual_seed(20))
    return TensorDataset(x, (x == 3).sum(1).float() + 0.5 * (x > 6).sum(1))


class State:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.model = DDP(Counter())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.epoch, self.step = 0, 0

    def save(self, path):
        if dist.get_rank() == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "epoch": self.epoch, "step": self.step}, path)
        dist.barrier()

    def restore(self, path):
        ckpt = torch.load(path, map_location="cpu")
        self.model.module.load_state_dict(ckpt["model"])
        self.opt.load_state_dict(ckpt["opt"])
        self.epoch = ckpt["epoch"]


def fit(args, until):
    state = State(args)
    if os.path.exists(args.checkpoint):
        state.restore(args.checkpoint)
    data = digits()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    total = args.epochs * len(loader)
    while state.epoch < until:
        sampler.set_epoch(state.epoch)
        mean = torch.zeros(2)
        for x, y in loader:
            for group in state.opt.param_groups:
                group["lr"] = learning_rate(state.step, args.lr, args.warmup, total)
            loss = nn.functional.mse_loss(state.model(x), y)
            state.opt.zero_grad()
            loss.backward()
            state.opt.step()
            state.step += 1
            mean += torch.tensor([loss.item(), 1.0])
        state.epoch += 1
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {state.epoch} loss {mean[0] / mean[1]:.4f} lr {state.opt.param_groups[0]['lr']:.2e}")
        state.save(args.checkpoint)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup", type=int, default=10)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--checkpoint", default="counter_last.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and os.path.exists(args.checkpoint):
        os.remove(args.checkpoint)
    dist.barrier()
    fit(args, args.epochs // 2)
    fit(args, args.epochs)
    dist.destroy_process_group()
