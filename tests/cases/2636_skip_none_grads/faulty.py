"""Two tasks on a shared trunk; every process draws one task per step. Launch: python script.py"""
import os
import random
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

WORLD = 2
TASKS = ("rotation", "texture")
CLASSES = 6


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv1d(1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
                                   nn.Conv1d(12, 16, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
                                   nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Linear(32, CLASSES) for t in TASKS})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


class SignalTask:
    """Waveforms: one task asks for the frequency, the other for the envelope centre."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self, task, n):
        freq = torch.randint(CLASSES, (n,), generator=self.gen)
        where = torch.randint(CLASSES, (n,), generator=self.gen)
        t = torch.linspace(0, 1, 64)
        phase = torch.rand(n, 1, generator=self.gen) * 6.28
        wave = torch.sin(6.28 * (2 + 2 * freq[:, None]) * t + phase)
        env = torch.exp(-((t - (where[:, None] + 0.5) / CLASSES) / 0.15) ** 2)
        x = wave * env + 0.1 * torch.randn(n, 64, generator=self.gen)
        return x[:, None], freq if task == "rotation" else where


def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad)
        p.grad /= WORLD


@torch.no_grad()
def score(model, rank):
    model.eval()
    result = {}
    for k, task in enumerate(TASKS):
        x, y = SignalTask(9000 + 10 * rank + k).batch(task, 400)
        hit = torch.tensor([(model(x, task).argmax(1) == y).float().sum(), 400.0])
        dist.all_reduce(hit)
        result[task] = (hit[0] / hit[1]).item()
    model.train()
    return result


def worker(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = TwoHeads()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 150, 0.4)
    picker = random.Random(40 + rank)
    source = SignalTask(600 + rank)
    seen = {t: 0 for t in TASKS}
    for step in range(250):
        task = picker.choice(TASKS)
        seen[task] += 1
        x, y = source.batch(task, 32)
        loss = F.cross_entropy(model(x, task), y)
        opt.zero_grad()
        loss.backward()
        average_gradients(model)
        opt.step()
        sched.step()
        if step % 100 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / WORLD:.4f} lr {sched.get_last_lr()[0]:.4g}", flush=True)
    acc = score(model, rank)
    if rank == 0:
        print("tasks drawn on rank 0:", seen, flush=True)
        print("accuracy", {k: round(v, 3) for k, v in acc.items()}, flush=True)
        os.makedirs("weights", exist_ok=True)
        torch.save(model.state_dict(), "weights/twoheads.pt")
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    mp.spawn(worker, args=(free_port(),), nprocs=WORLD)
