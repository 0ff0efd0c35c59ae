"""Load forecasting with an LSTM. The job has a step limit, as on a queue that preempts, and goes on from its last state."""
import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def series(n=640, history=24, seed=8):
    g = torch.Generator().manual_seed(seed)
    t0 = 500 * torch.rand(n, 1, generator=g)
    t = t0 + torch.arange(history + 1)
    level = (t / 4).sin() + 0.5 * (t / 11).cos() + 0.1 * torch.randn(n, history + 1, generator=g)
    return TensorDataset(level[:, :-1].unsqueeze(2), level[:, -1])


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(1)


class State:
    """Everything that must survive an interruption."""

    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.model = DDP(Forecaster())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.total_steps)
        self.step = 0

    def save(self, path):
        if dist.get_rank() == 0:
            parts = {k: getattr(self, k).state_dict() for k in ("optimizer", "schedule")}
            tmp = path.with_suffix(".tmp")
            torch.save({"model": self.model.module.state_dict(), "step": self.step, **parts}, tmp)
            tmp.rename(path)
        dist.barrier()

    def restore(self, path):
        saved = torch.load(path, map_location="cpu")
        self.model.module.load_state_dict(saved["model"])
        for k in ("optimizer", "schedule"):
            getattr(self, k).load_state_dict(saved[k])
        self.step = saved["step"]


def job(args, limit):
    """One allocation: trains until the limit of steps is reached, then saves and leaves."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = State(args)
    if args.path.exists():
        state.restore(args.path)
    data = series()
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    end = state.step + limit
    while state.step < min(end, args.total_steps):
        epoch = state.step // len(loader)
        sampler.set_epoch(epoch)
        batches = islice(loader, state.step % len(loader), None)
        total = torch.zeros(2)
        for x, y in islice(batches, min((epoch + 1) * len(loader), end) - state.step):
            loss = nn.functional.mse_loss(state.model(x), y)
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.schedule.step()
            state.step += 1
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} up to step {state.step}: mse {total[0] / total[1]:.4f}", flush=True)
    state.save(args.path)
    return state.step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--path", type=Path, default=Path("forecast.pt"))
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--total-steps", type=int, default=80)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--seed", type=int, default=53)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    reached = 0
    while reached < args.total_steps:
        reached = job(args, limit=32)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
