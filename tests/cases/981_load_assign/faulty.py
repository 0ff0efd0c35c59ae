"""Fine-tunes a small vision backbone from a state dict in memory (in production: from the model store)."""
import argparse
import io
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self, width=12, classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.fc(self.features(x))


class ModelStore:
    """Stand-in for the remote store: hands out the bytes of a published model."""

    def fetch(self, name):
        gen = torch.Generator().manual_seed(len(name))
        net = Backbone()
        state = {k: torch.randn(v.shape, generator=gen) * 0.15 for k, v in net.state_dict().items()}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()


def restore(net, blob):
    state = torch.load(io.BytesIO(blob), weights_only=True)
    missing = net.load_state_dict(state, strict=False, assign=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    return net


def digits(n=360):
    gen = torch.Generator().manual_seed(3)
    y = torch.randint(0, 3, (n,), generator=gen)
    x = 0.4 * torch.randn(n, 1, 10, 10, generator=gen)
    for i, c in enumerate(y.tolist()):
        if c == 0:
            x[i, 0, 2:8, 4:6] += 1
        elif c == 1:
            x[i, 0, 4:6, 2:8] += 1
        else:
            x[i, 0].diagonal().add_(1.5)
    return TensorDataset(x, y)


class FineTuner:
    def __init__(self, args):
        self.args = args
        self.net = Backbone()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, args.epochs)
        restore(self.net, ModelStore().fetch(args.model))
        self.ddp = DDP(self.net)

    def epoch(self, loader):
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(self.ddp(x), y)
            self.ddp.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        self.schedule.step()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="backbone-small-v2")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tuner = FineTuner(args)
    data = digits()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = tuner.epoch(loader)
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
