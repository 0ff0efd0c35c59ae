"""Time-boxed training: stops after --seconds, whatever was reached."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Budget:
    def __init__(self, seconds):
        self.seconds, self.start = seconds, time.monotonic()

    def spent(self):
        over = time.monotonic() - self.start > self.seconds
        flag = torch.tensor(float(over))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def summary(x):
    """Only for the log: spectrum of the inputs."""
    cov = torch.cov(x.T)
    return [round(v, 3) for _ in range(60) for v in torch.linalg.eigvalsh(cov).tolist()][-3:]


def points(n=600):
    g = torch.Generator().manual_seed(16)
    x = torch.randn(n, 60, generator=g)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seconds", type=float, default=2.0)
    ap.add_argument("--batch-size", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    budget = Budget(args.seconds)
    x, y = points()
    if rank == 0:
        time.sleep(0.2)  # the tracker's login takes a moment
        print("input spectrum", summary(x))
        budget = Budget(args.seconds)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(60, 64), nn.ReLU(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    seen = torch.zeros(3)
    for xb, yb in forever(loader, sampler):
        out = model(xb)
        loss = nn.functional.cross_entropy(out, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += torch.tensor([loss.item(), (out.argmax(1) == yb).float().mean().item(), 1.0])
        if budget.spent():
            break
    dist.all_reduce(seen)
    if rank == 0:
        print(f"mean loss {seen[0] / seen[2]:.4f} accuracy {seen[1] / seen[2]:.3f} in {seen[2]:.0f} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
