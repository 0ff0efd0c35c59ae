"""One epoch function for training and validation."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def make_loaders(batch):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(700, 1, 8, 8, generator=g)
    y = torch.randint(0, 3, (700,), generator=g)
    for k in range(3):
        x[y == k, :, 2 * k : 2 * k + 3] += 0.7
    train, val = random_split(TensorDataset(x, y), [500, 200], generator=torch.Generator().manual_seed(4))
    out = {}
    for name, part in (("train", train), ("val", val)):
        sampler = DistributedSampler(part, shuffle=name == "train")
        out[name] = DataLoader(part, batch_size=batch, sampler=sampler)
    return out


def network():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.4), nn.Linear(192, 3),
    )


class Epoch:
    def __init__(self, model, loader, optimizer=None):
        self.model, self.loader, self.optimizer = model, loader, optimizer

    @property
    def training(self):
        return self.optimizer is not None

    def run(self):
        meter = torch.zeros(3)
        with torch.set_grad_enabled(self.training):
            for x, y in self.loader:
                out = self.model(x)
                loss = nn.functional.cross_entropy(out, y)
                if self.training:
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                meter += torch.tensor([loss.item() * len(y), (out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(meter)
        return (meter[0] / meter[2]).item(), (meter[1] / meter[2]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(network())
    loaders = make_loaders(25)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(4):
        loaders["train"].sampler.set_epoch(epoch)
        train = Epoch(model, loaders["train"], opt).run()
        val = Epoch(model, loaders["val"]).run()
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch} train {train[0]:.3f}/{train[1]:.3f} val {val[0]:.3f}/{val[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
