"""Checkpoints every few hundred steps (every ten here)."""
import functools
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main_process_only(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        return fn(*args, **kwargs)
    return wrapper


class Checkpointer:
    def __init__(self, folder, keep=2):
        self.folder, self.keep = pathlib.Path(folder), keep

    @main_process_only
    def save(self, step, **parts):
        """write, forget old ones, and let nobody go on before the file is complete"""
        self.folder.mkdir(exist_ok=True)
        tmp = self.folder / f"step_{step:06d}.tmp"
        torch.save({"step": step, **{k: v.state_dict() for k, v in parts.items()}}, tmp)
        os.replace(tmp, tmp.with_suffix(".pt"))
        for old in sorted(self.folder.glob("step_*.pt"))[: -self.keep]:
            old.unlink()
        dist.barrier()


@main_process_only
def say(*words):
    print(*words, flush=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 7)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    ckpt = Checkpointer("checkpoints")
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, 41):
        x = torch.randn(32, 7, generator=gen)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1) * 0.5)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            ckpt.save(step, model=model.module, opt=opt)
            say("saved at step", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
