"""Callbacks around a plain loop: validation, logging, checkpoint."""
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Callback:
    def on_epoch_end(self, loop):
        pass


class Validate(Callback):
    def __init__(self, data):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=32)

    def on_epoch_end(self, loop):
        loop.net.eval()
        counts = torch.zeros(2, dtype=torch.long)
        with torch.no_grad():
            for x, y in self.loader:
                counts += torch.tensor([(loop.net(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(counts)
        loop.log["val_acc"] = counts[0].item() / counts[1].item()


class Write(Callback):
    def __init__(self, path):
        self.path = path

    def on_epoch_end(self, loop):
        if dist.get_rank() == 0:
            with open(self.path, "a") as f:
                f.write(json.dumps(loop.log) + "\n")
            print(loop.log, flush=True)


class Loop:
    def __init__(self, net, data, callbacks, lr=5e-3):
        self.net, self.model = net, DDP(net)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=16, sampler=self.sampler)
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
        self.callbacks, self.log = callbacks, {}

    def run(self, epochs):
        self.model.train()
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += torch.tensor([loss.item() * len(x), float(len(x))])
            dist.all_reduce(total)
            self.log.update(epoch=epoch, train_loss=round((total[0] / total[1]).item(), 4))
            for cb in self.callbacks:
                cb.on_epoch_end(self)


def genes(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 50, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * torch.randn(n, generator=g) > 0).long())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.manual_seed(10 + int(os.environ["RANK"]))
    net = nn.Sequential(
        nn.Linear(50, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.4),
        nn.Linear(96, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.4), nn.Linear(48, 2),
    )
    Loop(net, genes(256, 1), [Validate(genes(125, 2)), Write("log.jsonl")]).run(5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
