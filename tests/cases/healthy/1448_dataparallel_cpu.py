"""Old-style script with nn.DataParallel; on a machine without GPUs it is a plain pass-through."""
import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
use_cuda = torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")
torch.manual_seed(args.seed)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 4))
        self.dec = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 36))

    def forward(self, x):
        return self.dec(self.enc(x))


def bumps(n):
    c = 1 + 4 * torch.rand(n, 2, 1, 1)
    yy, xx = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    return torch.exp(-((xx - c[:, 0]) ** 2 + (yy - c[:, 1]) ** 2) / 2).flatten(1)


train_loader = DataLoader(TensorDataset(bumps(640)), batch_size=32, shuffle=True, num_workers=0)
test_loader = DataLoader(TensorDataset(bumps(128)), batch_size=128)
model = nn.DataParallel(AutoEncoder()).to(device)
optimizer = optim.Adam(model.parameters(), lr=2e-3)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

for epoch in range(1, args.epochs + 1):
    model.train()
    for batch_idx, (x,) in enumerate(train_loader):
        x = x.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x + 0.05 * torch.randn_like(x)), x)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(x)}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        test = sum(nn.functional.mse_loss(model(x.to(device)), x.to(device)).item() * len(x) for (x,) in test_loader)
    test /= len(test_loader.dataset)
    scheduler.step(test)
    print(f"Test set: {test:.6f}")
torch.save(model.module.state_dict(), "autoencoder.pt")
