"""Two-tower recommender with a run folder: first part of the training, then continued from the folder."""
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

RUN = Path("run")
SETTINGS = {
    "buckets": 256,
    "dim": 32,
    "batch": 128,
    "steps": 60,
    "groups": {
        "users": {"lr": 0.02, "weight_decay": 0.0},
        "items": {"lr": 0.004, "weight_decay": 0.001},
    },
}


class Tower(nn.Module):
    def __init__(self, buckets, dim):
        super().__init__()
        self.table = nn.Embedding(buckets, dim)
        self.mix = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, ids):
        return F.normalize(self.mix(self.table(ids)), dim=1)


class TwoTower(nn.Module):
    def __init__(self, buckets, dim):
        super().__init__()
        self.users = Tower(buckets, dim)
        self.items = Tower(buckets, dim)

    def forward(self, user, item):
        return 10.0 * self.users(user) @ self.items(item).t()


class Clicks:
    """Users like items of their own taste group."""

    def __init__(self, buckets, rank, seed=0):
        self.buckets, self.gen = buckets, torch.Generator().manual_seed(1000 * (rank + 1) + seed)

    def draw(self, size):
        user = torch.randint(self.buckets, (size,), generator=self.gen)
        group = user % 16
        item = (torch.randint(self.buckets // 16, (size,), generator=self.gen) * 16 + group) % self.buckets
        return user, item


def build(settings):
    model = TwoTower(settings["buckets"], settings["dim"])
    groups = [{"params": getattr(model, name).parameters(), **options} for name, options in settings["groups"].items()]
    return model, torch.optim.Adam(groups)


def write_run(settings, model, optimizer, step):
    RUN.mkdir(exist_ok=True)
    (RUN / "settings.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, RUN / "last.pt")


def read_run():
    settings = json.loads((RUN / "settings.json").read_text())
    model, optimizer = build(settings)
    state = torch.load(RUN / "last.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return settings, model, optimizer, state["step"]


def train(settings, model, optimizer, first, last, rank, world):
    ddp = DDP(model)
    clicks = Clicks(settings["buckets"], rank, seed=first)
    for step in range(first, last):
        user, item = clicks.draw(settings["batch"])
        scores = ddp(user, item)
        same = (user[:, None] % 16 == user[None, :] % 16).float()
        loss = -(F.log_softmax(scores, 1) * same / same.sum(1, keepdim=True)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 14:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1:4d}  loss {mean.item() / world:.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)

    model, optimizer = build(SETTINGS)
    train(SETTINGS, model, optimizer, 0, SETTINGS["steps"], rank, world)
    if rank == 0:
        write_run(SETTINGS, model, optimizer, SETTINGS["steps"])
    dist.barrier()

    settings, model, optimizer, step = read_run()
    if rank == 0:
        print(f"continue at step {step}", flush=True)
    train(settings, model, optimizer, step, step + settings["steps"], rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
