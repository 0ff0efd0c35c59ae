"""Keyword spotting from one packed file of 16-bit audio."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLIP = 12000
BLOCK = 1500
WORDS = ["yes", "no", "stop", "go", "left", "right"]


def write_pack(path, clips, seed):
    """Concatenate clips of different lengths; the table of contents goes to <path>.npy."""
    rng = np.random.default_rng(seed)
    toc, offset = [], 0
    with open(path, "wb") as out:
        for _ in range(clips):
            word = int(rng.integers(len(WORDS)))
            n = int(rng.integers(9000, 14000))
            t = np.arange(n) / 8000.0
            tone = np.sin(2 * np.pi * (180 + 140 * word) * t + rng.uniform(0, 6.28))
            wave = 0.4 * tone + 0.15 * rng.standard_normal(n)
            raw = (np.clip(wave, -1, 1) * 32767).astype(np.int16).tobytes()
            out.write(raw)
            toc.append((offset, n, word))
            offset += len(raw)
    np.save(path + ".npy", np.array(toc, dtype=np.int64))


class PackedClips(Dataset):
    def __init__(self, path):
        self.toc = np.load(path + ".npy")
        self.path = path
        self.pack = None

    def __len__(self):
        return len(self.toc)

    def __getitem__(self, i):
        offset, n, word = (int(v) for v in self.toc[i])
        if self.pack is None:
            self.pack = open(self.path, "rb")
        self.pack.seek(offset)
        clip = np.zeros(CLIP, dtype=np.float32)
        for start in range(0, min(n, CLIP), BLOCK):  # level the volume block by block
            want = min(BLOCK, n - start, CLIP - start)
            pcm = np.frombuffer(self.pack.read(2 * want), dtype=np.int16).astype(np.float32)
            clip[start:start + len(pcm)] = 0.3 * pcm / (np.sqrt(np.mean(pcm**2)) + 1.0)
        return torch.from_numpy(clip)[None], word


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(1, 24, 128, stride=32)
        self.mid = nn.Conv1d(24, 32, 5, stride=2)
        self.out = nn.Linear(32, len(WORDS))

    def forward(self, x):
        x = torch.relu(self.front(x))
        x = torch.relu(self.mid(x))
        return self.out(x.mean(dim=2))


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for wave, word in loader:
        hits += torch.tensor([float((model(wave).argmax(1) == word).sum()), float(len(word))])
    model.train()
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    if rank == 0:
        write_pack("train.pcm", 384, seed=1)
        write_pack("test.pcm", 96, seed=2)
    dist.barrier()

    train, test = PackedClips("train.pcm"), PackedClips("test.pcm")
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    test_loader = DataLoader(test, args.batch, sampler=DistributedSampler(test, shuffle=False))

    model = DDP(Spotter())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for wave, word in loader:
            loss = F.cross_entropy(model(wave), word)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        acc = accuracy(model, test_loader)
        if rank == 0:
            mean = total.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch} loss {mean:.3f} test accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
