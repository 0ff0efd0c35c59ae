"""DDP with ZeroRedundancyOptimizer, layer-wise learning rates, a profiler on rank 0, consolidation.

Each rank holds the Adam moments of its own part of the parameters only; before the checkpoint all
ranks take part in consolidate_state_dict(to=0).
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Gratings(Dataset):
    """Computed on demand; item i is the same everywhere."""

    def __init__(self, n, base):
        self.n, self.base = n, base
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
        self.xx, self.yy = xx, yy

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.base + i)
        label = int(torch.randint(3, (1,), generator=g))
        r2 = self.xx ** 2 + self.yy ** 2
        shape = [r2 < 0.5, self.xx.abs() + self.yy.abs() < 0.6,
                 (self.xx.abs() < 0.25) | (self.yy.abs() < 0.25)][label].float()
        return (shape + 0.5 * torch.randn(12, 12, generator=g)).unsqueeze(0), label


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.body = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1),
                                  nn.GroupNorm(4, 16), nn.SiLU())
        self.head = nn.Linear(16 * 36, 3)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).flatten(1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = ConvNet()
    ddp = DDP(net)
    lr = 3e-3
    groups = [
        {"params": list(net.stem.parameters()), "lr": lr * 0.25},
        {"params": list(net.body.parameters()), "lr": lr * 0.5},
        {"params": list(net.head.parameters()), "lr": lr},
    ]
    opt = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.Adam, lr=lr)
    warmup = 15
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / warmup))

    train, test = Gratings(1000, 0), Gratings(301, 10_000)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=25, sampler=sampler)

    prof = None
    if rank == 0:
        prof = profile(activities=[ProfilerActivity.CPU],
                       schedule=schedule(wait=2, warmup=1, active=2, repeat=1))
        prof.start()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        ddp.train()
        t0 = time.perf_counter()
        run = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            opt.step()
            sched.step()
            run += torch.tensor([loss.item() * len(y), len(y)])
            if prof is not None:
                prof.step()
        dist.all_reduce(run)
        if rank == 0:
            print(f"epoch {epoch} loss {run[0] / run[1]:.4f} {time.perf_counter() - t0:.2f}s", flush=True)
    if prof is not None:
        prof.stop()
        with open("profile_rank0.txt", "w") as fh:
            fh.write(prof.key_averages().table(sort_by="cpu_time_total", row_limit=8))

    # test: a strided split without padding; the counts are summed, so uneven parts are no problem
    ddp.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        ids = list(range(rank, len(test), world))
        for k in range(0, len(ids), 50):
            xs, ys = zip(*(test[i] for i in ids[k:k + 50]))
            pred = net(torch.stack(xs)).argmax(1)
            counts += torch.tensor([(pred == torch.tensor(ys)).sum().item(), len(ys)])
    dist.all_reduce(counts)
    assert counts[1] == 301
    acc = (counts[0] / counts[1]).item()

    opt.consolidate_state_dict(to=0)
    if rank == 0:
        os.makedirs("zero_out", exist_ok=True)
        torch.save({"model": net.state_dict(), "optim": opt.state_dict(), "sched": sched.state_dict()},
                   "zero_out/last.pt")
        print(f"test acc {acc:.3f}")
    assert acc > 0.85
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
