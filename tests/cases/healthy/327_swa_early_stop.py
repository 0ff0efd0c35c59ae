"""Stochastic weight averaging with an early stop that rank 0 decides and everybody obeys."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Patience:
    def __init__(self, n, delta=1e-4):
        self.n, self.delta, self.best, self.since = n, delta, float("inf"), 0

    def __call__(self, value):
        self.since = 0 if value < self.best - self.delta else self.since + 1
        self.best = min(self.best, value)
        return self.since >= self.n


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 2.1 * y + 4 * r + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.sin(), r * a.cos()], 1), y)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    model = DDP(net)
    averaged = AveragedModel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    swa_scheduler = SWALR(opt, swa_lr=0.1, anneal_epochs=2)
    swa_start = 3
    train, val = spiral(384, 1), spiral(99, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32, sampler=sampler)
    patience = Patience(2)
    stop = torch.zeros(1, dtype=torch.uint8)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch >= swa_start:
            averaged.update_parameters(net)  # same weights on all ranks, so the same average
            swa_scheduler.step()
        if rank == 0:
            candidate = averaged if epoch >= swa_start else net
            candidate.eval()
            with torch.no_grad():
                x, y = val.tensors
                vl = nn.functional.cross_entropy(candidate(x), y).item()
            candidate.train()
            print(f"epoch {epoch}: val loss {vl:.4f}")
            stop.fill_(int(patience(vl)))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    print(f"[rank {rank}] finished after epoch {epoch}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
