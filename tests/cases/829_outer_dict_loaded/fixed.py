"""Feature extractor trained on one task, reused for another."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def patches(n=224, seed=0):
    """Gratings with an orientation (4) and a frequency (3)."""
    g = torch.Generator().manual_seed(seed)
    o, f = torch.randint(0, 4, (n,), generator=g), torch.randint(0, 3, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.linspace(0, 3, 8), torch.linspace(0, 3, 8), indexing="ij")
    angle = 0.7854 * o.view(-1, 1, 1)
    wave = torch.sin((1.5 + f.view(-1, 1, 1)) * (angle.cos() * xx + angle.sin() * yy))
    return (wave + 0.2 * torch.randn(n, 8, 8, generator=g)).unsqueeze(1), o, f


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Linear(256, classes)

    def forward(self, x):
        return self.classifier(self.features(x))


def fit(net, x, y, epochs, rank, name):
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"{name} epoch {epoch}: loss {loss.item():.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--weights", default="orientation.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    x, orientation, frequency = patches()

    net = Net(classes=4)
    fit(net, x, orientation, 3, rank, "orientation")
    if rank == 0:
        state = {k: v for k, v in net.state_dict().items() if not k.startswith("classifier")}
        torch.save({"model": state, "epoch": 3}, args.weights)
    dist.barrier()

    net = Net(classes=3)
    checkpoint = torch.load(args.weights, map_location="cpu")
    net.load_state_dict(checkpoint["model"], strict=False)  # the classifier is new
    fit(net, x, frequency, 3, rank, "frequency")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
