"""Random search over learning rate / weight decay with short trials, then one longer run with the winner."""
import json
import math
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Trial:
    lr: float
    weight_decay: float
    width: int


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2].abs() - 0.5 * x[:, 3] * x[:, 4]
    return TensorDataset(x, (y + 0.05 * torch.randn(n, generator=g)).unsqueeze(1))


def build(width):
    return nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))


class Runner:
    def __init__(self):
        self.rank = dist.get_rank()
        self.train_ds, self.val_ds, self.test_ds = dataset(1024, 1), dataset(256, 2), dataset(256, 3)

    def run(self, trial, epochs, verbose=False):
        torch.manual_seed(100)
        model = DDP(build(trial.width))
        opt = torch.optim.AdamW(model.parameters(), lr=trial.lr, weight_decay=trial.weight_decay)
        sampler = DistributedSampler(self.train_ds, shuffle=True, seed=5)
        dl = DataLoader(self.train_ds, batch_size=32, sampler=sampler, drop_last=True)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * len(dl))
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in dl:
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                sched.step()
            if verbose:
                val = self.mse(model.module, self.val_ds)
                if self.rank == 0:
                    print(f"  epoch {epoch} val mse {val:.4f}")
        return model.module, self.mse(model.module, self.val_ds)

    @torch.no_grad()
    def mse(self, net, ds):
        dl = DataLoader(ds, batch_size=64, sampler=DistributedSampler(ds, shuffle=False))
        acc = torch.zeros(2, dtype=torch.float64)
        for x, y in dl:
            acc[0] += F.mse_loss(net(x), y, reduction="sum").double()
            acc[1] += len(y)
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()


def sample_trials(n, rank):
    """Only the first process rolls the dice; the others are told."""
    box = [None]
    if rank == 0:
        g = torch.Generator().manual_seed(2024)
        trials = []
        for _ in range(n):
            u = torch.rand(3, generator=g).tolist()
            trials.append(Trial(10 ** (-4 + 2.5 * u[0]), 10 ** (-4 + 3 * u[1]), [24, 48][int(2 * u[2])]))
        box[0] = trials
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    runner = Runner()
    results = []
    for trial in sample_trials(4, rank):
        _, val = runner.run(trial, epochs=1)
        results.append((val if math.isfinite(val) else float("inf"), trial))
        if rank == 0:
            print(f"trial lr {trial.lr:.2e} wd {trial.weight_decay:.2e} width {trial.width}: val {val:.4f}")
    best_val, best = min(results, key=lambda r: r[0])

    if rank == 0:
        print(f"winner {best}")
    net, val = runner.run(best, epochs=5, verbose=True)
    test = runner.mse(net, runner.test_ds)
    if rank == 0:
        print(f"final val {val:.4f} test {test:.4f}")
        with open("search.json", "w") as f:
            json.dump({"best": asdict(best), "short_val": best_val, "val": val, "test": test}, f, indent=1)
        torch.save(net.state_dict(), "winner.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
