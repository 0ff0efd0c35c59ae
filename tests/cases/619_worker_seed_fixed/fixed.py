"""Augmented audio-command classifier, loader workers with numpy noise."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Commands(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(4)
        self.label = torch.randint(0, 4, (n,), generator=g)
        t = torch.arange(40.0)
        self.wave = (t * 0.2 * (1 + self.label[:, None])).sin() + 0.3 * torch.randn(n, 40, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        wave = self.wave[i].numpy()
        shift = np.random.randint(-6, 7)
        noise = np.random.normal(0, 0.2, size=wave.shape)
        return torch.from_numpy(np.roll(wave, shift) + noise).float(), self.label[i]


def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def build_loader(data, batch_size, workers, seed, rank):
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(seed * 100 + rank),
    )
    return loader, sampler


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=15)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--seed", type=int, default=6)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Unflatten(1, (1, 40)), nn.Conv1d(1, 12, 7), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(48, 4))
    model = DDP(net)
    loader, sampler = build_loader(Commands(), args.batch_size, args.workers, args.seed, rank)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        hit = torch.zeros(2)
        for wave, label in loader:
            out = model(wave)
            loss = nn.functional.cross_entropy(out, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            hit += torch.tensor([(out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(hit)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {hit[0] / hit[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
