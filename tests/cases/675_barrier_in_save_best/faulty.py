"""Keeps the best weights of a run; a keeper object decides and writes."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class BestKeeper:
    def __init__(self, folder, mode="min"):
        self.path = os.path.join(folder, "best.pt")
        self.sign = 1 if mode == "min" else -1
        self.best = float("inf")
        self.improved = 0

    def update(self, value, model):
        if self.sign * value >= self.best:
            return False
        self.best = self.sign * value
        self.improved += 1
        self.write(model)
        return True

    def write(self, model):
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), self.path)
        dist.barrier()


class Evaluator:
    def __init__(self, loader, metric, reduce=False):
        self.loader, self.metric, self.reduce = loader, metric, reduce

    @torch.no_grad()
    def __call__(self, model):
        model.eval()
        stat = torch.zeros(2)
        for x, y in self.loader:
            stat += torch.tensor([self.metric(model(x), y).item() * len(x), len(x)])
        if self.reduce:
            dist.all_reduce(stat)
        model.train()
        return (stat[0] / stat[1]).item()


def noisy(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 5, generator=g) * 2 - 1
    y = (2 * x[:, 0] * x[:, 1] + x[:, 2].abs() + 0.5 * torch.randn(n, generator=g)).unsqueeze(1)
    return TensorDataset(x, y)


def main(epochs=12):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.8)
    train, valid = noisy(240, 1), noisy(48, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=12, sampler=sampler)
    evaluate = Evaluator(DataLoader(valid, batch_size=24, sampler=DistributedSampler(valid, shuffle=False)), nn.functional.mse_loss)
    folder = os.path.join(tempfile.gettempdir(), f"best_{os.getppid()}")
    os.makedirs(folder, exist_ok=True)
    keeper = BestKeeper(folder)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = evaluate(model)
        mark = "*" if keeper.update(value, model) else ""
        if rank == 0:
            print(f"epoch {epoch}: validation mse {value:.4f} {mark}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
