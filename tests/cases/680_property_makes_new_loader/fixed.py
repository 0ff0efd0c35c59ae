"""Data module with properties; the trainer asks it for what it needs."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


class DataModule:
    def __init__(self, batch_size=20, seed=0):
        self.batch_size, self.seed = batch_size, seed

    def setup(self):
        g = torch.Generator().manual_seed(55)
        x = torch.randn(500, 1, 9, 9, generator=g)
        kernel = torch.randn(3, 1, 9, 9, generator=g)
        y = nn.functional.conv2d(x, kernel).flatten(1).argmax(1)
        split = torch.Generator().manual_seed(self.seed)
        self.train_set, self.valid_set = random_split(TensorDataset(x, y), [400, 100], generator=split)

    def _loader(self, dataset, shuffle):
        sampler = DistributedSampler(dataset, shuffle=shuffle, seed=self.seed)
        return DataLoader(dataset, batch_size=self.batch_size, sampler=sampler)

    @property
    def train_loader(self):
        return self._loader(self.train_set, True)

    @property
    def valid_loader(self):
        return self._loader(self.valid_set, False)


class Trainer:
    def __init__(self, model, data, epochs=5, lr=3e-3):
        self.data, self.epochs = data, epochs
        self.model = DDP(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def fit(self):
        for epoch in range(self.epochs):
            loader = self.data.train_loader
            loader.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            acc = self.validate()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: validation accuracy {acc:.3f}")

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        stat = torch.zeros(2)
        for x, y in self.data.valid_loader:
            stat += torch.tensor([float((self.model(x).argmax(1) == y).sum()), float(len(y))])
        dist.all_reduce(stat)
        return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ.get("SEED", 9)))
    data = DataModule()
    data.setup()
    net = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.Conv2d(16, 16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    Trainer(net, data).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
