"""ConvNet with batch norm; validation is cheap, so the first process does it alone."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def crosses(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (n,), generator=g)
    image = 0.5 * torch.randn(n, 1, 9, 9, generator=g)
    eye = torch.eye(9)
    image[label == 0] += eye
    image[label == 1] += eye.flip(0)
    return TensorDataset(image, label)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.classifier = nn.Linear(8 * 25, 2)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    hits = seen = 0
    for image, label in loader:
        hits += (model(image).argmax(1) == label).sum().item()
        seen += len(label)
    model.train()
    return hits / seen


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    model = DDP(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train_set, val_set = crosses(320, 1), crosses(120, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=30)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, label in loader:
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            accuracy = validate(model, val_loader)
            print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
            if accuracy > best:
                best = accuracy
                torch.save(model.module.state_dict(), "crosses.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
