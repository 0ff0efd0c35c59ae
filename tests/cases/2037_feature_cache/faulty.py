"""Bird-call classifier. Rank 0 turns the recordings into band energies once; all ranks train from that cache."""
import logging
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from numpy.lib.format import open_memmap
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CALLS, KINDS, SAMPLES, WINDOW = 768, 4, 4096, 128
FRAMES, BANDS = SAMPLES // WINDOW, WINDOW // 4
log = logging.getLogger("birds")


def kind_of(i):
    return (i * 7 + i // 11) % KINDS


def recording(i):
    gen = np.random.default_rng(i)
    t = np.arange(SAMPLES) / SAMPLES
    slide = 150 + 180 * kind_of(i) + 60 * np.sin(2 * np.pi * (2 + kind_of(i)) * t + gen.uniform(0, 6))
    return np.sin(2 * np.pi * np.cumsum(slide) / SAMPLES) + gen.normal(0, 1.2, SAMPLES)


def band_energies(wave):
    frames = wave.reshape(FRAMES, WINDOW) * np.hanning(WINDOW)
    return np.log1p(np.abs(np.fft.rfft(frames, axis=1))[:, :BANDS]).astype(np.float32)


def fill_cache(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    cache = open_memmap(path, mode="w+", dtype=np.float32, shape=(CALLS, FRAMES, BANDS))
    for i in range(CALLS):
        cache[i] = band_energies(recording(i))
    cache.flush()


def wait_for(path, limit=300.0, pause=0.05):
    end = time.monotonic() + limit
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not appear within {limit:.0f} s")
        time.sleep(pause)


class Calls(Dataset):
    def __init__(self, path):
        features = torch.from_numpy(np.load(path))
        self.features = (features - features.mean()) / (features.std() + 1e-6)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, i):
        return self.features[i], kind_of(i)


class CallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames = nn.Sequential(nn.Conv1d(BANDS, 48, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2))
        self.rnn = nn.GRU(48, 48, batch_first=True)
        self.head = nn.Linear(48, KINDS)

    def forward(self, x):
        h = self.frames(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(h)[0].mean(1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s %(message)s")
    torch.manual_seed(23)
    path = Path(os.environ.get("CACHE_DIR", "cache")) / "energies.npy"
    if rank == 0:
        if not path.exists():
            fill_cache(path)
            log.info("cache written: %s", path)
    else:
        wait_for(path)

    data = Calls(path)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=24, sampler=sampler, drop_last=True)
    model = DDP(CallNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        log.info("epoch %d loss %.4f", epoch, total[0] / total[1])
    if rank == 0:
        torch.save(model.module.state_dict(), "calls.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
