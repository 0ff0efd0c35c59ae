# Super-resolution of 1-d signals, orthogonal initialisation. Launch with torchrun.
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nEpochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=123)
opt = parser.parse_args()


class Signals(Dataset):
    def __init__(self, n, upscale):
        t = np.linspace(0, 1, 32, dtype=np.float32)
        rng = np.random.default_rng(0)
        f, p = rng.uniform(1, 4, (n, 1)), rng.uniform(0, 6, (n, 1))
        self.hi = torch.tensor(np.sin(6.28 * f * t + p), dtype=torch.float32).unsqueeze(1)
        self.upscale = upscale

    def __len__(self):
        return len(self.hi)

    def __getitem__(self, i):
        noise = 0.02 * torch.randn(1, 32 // self.upscale)
        return self.hi[i][:, :: self.upscale] + noise, self.hi[i]


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 24, 5, padding=2)
        self.conv2 = nn.Conv1d(24, 24, 3, padding=1)
        self.conv3 = nn.Conv1d(24, upscale_factor, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.conv3(x).transpose(1, 2).reshape(x.size(0), 1, -1)


def init_orthogonal(m):
    if isinstance(m, nn.Conv1d):
        nn.init.orthogonal_(m.weight, nn.init.calculate_gain("relu"))
        nn.init.zeros_(m.bias)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    seed_all(opt.seed + rank)  # noise should differ
    net = Net(opt.upscale_factor)
    net.apply(init_orthogonal)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=opt.lr)
    train_set = Signals(256, opt.upscale_factor)
    sampler = DistributedSampler(train_set, seed=opt.seed)
    loader = DataLoader(train_set, batch_size=opt.batchSize, sampler=sampler)
    for epoch in range(1, opt.nEpochs + 1):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(1)
        for low, high in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(low), high)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.detach()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
