"""Denoising autoencoder fed from a streaming dataset with long-lived loader workers."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class WaveStream(IterableDataset):
    """Goes once over the recordings in a new order each epoch, cropping and corrupting on the fly."""

    def __init__(self, n, crop, rank, world, seed):
        self.n, self.crop = n, crop
        self.rank, self.world, self.seed = rank, world, seed
        g = torch.Generator().manual_seed(2)
        t = torch.linspace(0, 8, 96)
        freq = torch.rand(n, 2, generator=g) * 3 + 0.5
        phase = torch.rand(n, 2, generator=g) * 6.28
        self.waves = torch.sin(freq[..., None] * t + phase[..., None]).sum(1)
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __iter__(self):
        info = get_worker_info()
        workers, wid = (info.num_workers, info.id) if info else (1, 0)
        epoch = int(self.epoch)
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + 7919 * epoch))
        mine = order[self.rank :: self.world][wid::workers]
        g = torch.Generator().manual_seed(hash((self.seed, epoch, self.rank, wid)) % (1 << 31))
        for i in mine.tolist():
            at = int(torch.randint(0, 96 - self.crop + 1, (), generator=g))
            clean = self.waves[i, at : at + self.crop]
            keep = (torch.rand(self.crop, generator=g) > 0.25).float()
            yield (clean + 0.3 * torch.randn(self.crop, generator=g)) * keep, clean


class Denoiser(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, ch, 5, padding=2), nn.GELU(), nn.Conv1d(ch, ch, 5, stride=2, padding=2), nn.GELU())
        self.mid = nn.Sequential(nn.Conv1d(ch, ch, 5, padding=2), nn.GELU())
        self.dec = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv1d(ch, 1, 5, padding=2))

    def forward(self, x):
        h = self.enc(x.unsqueeze(1))
        return self.dec(h + self.mid(h)).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    stream = WaveStream(1536, 64, rank, world, args.seed)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers, persistent_workers=True, drop_last=True)
    torch.manual_seed(args.seed)
    model = DDP(Denoiser())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.85)

    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        total = torch.zeros(2)
        for noisy, clean in loader:
            loss = nn.functional.smooth_l1_loss(model(noisy), clean)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        sched.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.5f} batches {int(total[1])}", flush=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "denoiser.pt")
    del loader
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
