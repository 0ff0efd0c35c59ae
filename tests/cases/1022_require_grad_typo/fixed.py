"""Transfer learning: frozen features, new classifier."""
import argparse
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Vgg(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Linear(24 * 9, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def flowers(n=200):
    g = torch.Generator().manual_seed(12)
    y = torch.randint(0, 5, (n,), generator=g)
    colour = torch.rand(5, 3, generator=g)
    x = colour[y][:, :, None, None] + 0.2 * torch.randn(n, 3, 12, 12, generator=g)
    return TensorDataset(x, y)


def build_model(hidden):
    vgg = Vgg()
    # Freeze training for all "features" layers
    for param in vgg.features.parameters():
        param.requires_grad = False
    vgg.classifier = nn.Sequential(
        OrderedDict([("fc1", nn.Linear(24 * 9, hidden)), ("relu", nn.ReLU()), ("drop", nn.Dropout(0.2)), ("fc2", nn.Linear(hidden, 5))])
    )
    return vgg


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--hidden", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DistributedDataParallel(build_model(args.hidden))
    trainset = flowers()
    sampler = DistributedSampler(trainset)
    trainloader = DataLoader(trainset, batch_size=20, sampler=sampler)
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        train_loss = torch.tensor(0.0)
        for data, target in trainloader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            train_loss += loss.item() / len(trainloader)
        dist.all_reduce(train_loss)
        if rank == 0:
            print(f"Epoch {epoch} \tTraining loss {train_loss.item() / dist.get_world_size():.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.classifier.state_dict(), "classifier.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
