"""Load forecasting. The queue gives us limited jobs; each one picks up where the last one stopped."""
import glob
import json
import os

import torch
import torch.distributed as dist
from torch import nn

SETTINGS = json.loads("""
{
  "hidden": 40, "window": 48, "horizon": 6, "batch": 24,
  "lr": 0.004, "seed": 8, "save_every": 10,
  "job_limits": [115, 200], "dir": "checkpoints"
}
""")


def say(msg):
    if dist.get_rank() == 0:
        print(msg, flush=True)


def series():
    t = torch.arange(6000, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    load = torch.sin(t / 24 * 6.283) + 0.5 * torch.sin(t / 168 * 6.283) + 0.1 * torch.randn(6000, generator=g)
    return load


def batch_at(load, step, rank, cfg):
    """Windows are a function of the step, so a resumed job sees what comes next."""
    g = torch.Generator().manual_seed(cfg["seed"] * 100003 + step * 2 + rank)
    span = cfg["window"] + cfg["horizon"]
    starts = torch.randint(len(load) - span, (cfg["batch"],), generator=g)
    windows = torch.stack([load[s:s + span] for s in starts.tolist()])
    return windows[:, :cfg["window"], None], windows[:, cfg["window"]:]


class Forecaster(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.rnn = nn.GRU(1, cfg["hidden"], batch_first=True)
        self.out = nn.Linear(cfg["hidden"], cfg["horizon"])

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h[:, -1])


def save(path, model, optimizer, scheduler, step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
             "scheduler": scheduler.state_dict(), "step": step}
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def newest(folder):
    found = sorted(glob.glob(os.path.join(folder, "step_*.pt")), key=lambda p: int(p.rsplit("_", 1)[1][:-3]))
    return found[-1] if found else None


def job(cfg, last_step):
    rank = dist.get_rank()
    torch.manual_seed(cfg["seed"])
    load = series()
    model = Forecaster(cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 80, gamma=0.5)
    step = 0
    choice = [newest(cfg["dir"]) if rank == 0 else None]
    dist.broadcast_object_list(choice, src=0)
    path = choice[0]
    if path:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]
        say(f"continuing from {path}")
    replica = nn.parallel.DistributedDataParallel(model)
    while step < last_step:
        x, y = batch_at(load, step, rank, cfg)
        loss = nn.functional.mse_loss(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 25 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            say(f"step {step:4d} mse {mean.item():.4f} lr {scheduler.get_last_lr()[0]:.4g}")
        if (step % cfg["save_every"] == 0 or step == last_step) and rank == 0:
            save(os.path.join(cfg["dir"], f"step_{step}.pt"), model, optimizer, scheduler, step)


def main():
    dist.init_process_group("gloo")
    os.makedirs(SETTINGS["dir"], exist_ok=True)
    for number, limit in enumerate(SETTINGS["job_limits"], 1):
        say(f"job {number}: up to step {limit}")
        job(SETTINGS, limit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
