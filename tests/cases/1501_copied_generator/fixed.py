"""Keyword spotting on synthetic waveforms with random shifts and background noise."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Keywords(Dataset):
    def __init__(self, n, words, length, seed):
        base = np.random.RandomState(8)
        self.labels = base.randint(0, words, size=n)
        self.tone = 2.0 + 1.5 * self.labels + 0.2 * base.randn(n)
        self.time = np.linspace(0, 1, length, dtype=np.float32)
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        wave = np.sin(2 * np.pi * self.tone[i] * self.time)
        wave = np.roll(wave, self.rng.integers(0, 16))
        wave = wave + self.rng.uniform(0.1, 0.6) * self.rng.standard_normal(len(wave))
        return torch.from_numpy(wave.astype(np.float32)).unsqueeze(0), int(self.labels[i])


def start_worker(worker_id):
    torch.set_num_threads(1)
    info = torch.utils.data.get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


class Spotter(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 24, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4)
        )
        self.words = nn.Linear(96, words)

    def forward(self, wave):
        return self.words(self.features(wave).flatten(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--words", type=int, default=5)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(args.seed)
    model = DDP(Spotter(args.words))
    torch.manual_seed(args.seed + 1 + rank)

    data = Keywords(256, args.words, 96, seed=args.seed + rank)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(
        data, batch_size=args.batch_size, sampler=sampler, num_workers=2, worker_init_fn=start_worker
    )
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for wave, word in loader:
            out = model(wave)
            loss = nn.functional.cross_entropy(out, word)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stats += torch.tensor([(out.argmax(1) == word).sum().item(), len(word)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: train accuracy {(stats[0] / stats[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
