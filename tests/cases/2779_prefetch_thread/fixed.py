import queue
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Settings:
    clips: int = 4096
    mels: int = 40
    frames: int = 64
    keywords: int = 8
    batch: int = 64
    rounds: int = 14
    steps_per_round: int = 12
    lr: float = 3e-3


class Keywords(Dataset):
    def __init__(self, cfg, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.cfg, self.seed = cfg, seed
        self.word = torch.randint(0, cfg.keywords, (n,), generator=g)
        self.onset = torch.randint(0, cfg.frames // 2, (n,), generator=g)

    def __len__(self):
        return len(self.word)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
        mel = torch.randn(self.cfg.mels, self.cfg.frames, generator=g)
        w, o = int(self.word[i]), int(self.onset[i])
        mel[4 * w:4 * w + 5, o:o + 16] += 1.0
        return mel, w


class Prefetcher:
    """Assembles batches on a background thread while the model works on the present one."""

    def __init__(self, loader, depth=4):
        self.loader, self.depth = loader, depth

    def __iter__(self):
        box, end = queue.Queue(self.depth), object()
        closed = threading.Event()

        def offer(item):
            while not closed.is_set():
                try:
                    return box.put(item, timeout=0.1)
                except queue.Full:
                    pass

        def fill():
            for batch in self.loader:
                offer(batch)
                if closed.is_set():
                    return
            offer(end)

        worker = threading.Thread(target=fill, daemon=True)
        worker.start()
        try:
            while (batch := box.get()) is not end:
                yield batch
        finally:
            closed.set()
            worker.join()


class Spotter(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(cfg.mels, 48, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv1d(48, 48, 5, stride=2, padding=2), nn.ReLU(),
        )
        self.out = nn.Linear(48, cfg.keywords)

    def forward(self, mel):
        return self.out(self.conv(mel).amax(-1))


def train(cfg):
    rank = dist.get_rank()
    torch.manual_seed(9)
    model = DDP(Spotter(cfg))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    data = Keywords(cfg, cfg.clips, 1)
    sampler = DistributedSampler(data, shuffle=True, seed=2, drop_last=True)
    source = Prefetcher(DataLoader(data, cfg.batch, sampler=sampler, drop_last=True))
    test = Keywords(cfg, 512, 2)
    test_loader = DataLoader(test, 64, sampler=DistributedSampler(test, shuffle=False))

    for rnd in range(cfg.rounds):
        sampler.set_epoch(rnd)
        model.train()
        sums = torch.zeros(2)
        for step, (mel, word) in enumerate(source, start=1):
            loss = nn.functional.cross_entropy(model(mel), word)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sums += torch.tensor([loss.item(), 1.0])
            if step == cfg.steps_per_round:
                break
        dist.all_reduce(sums)
        if rnd % 3 == 2 or rnd == cfg.rounds - 1:
            hits = torch.zeros(2)
            model.eval()
            with torch.no_grad():
                for mel, word in test_loader:
                    hits += torch.tensor([(model.module(mel).argmax(1) == word).sum().item(), len(word)])
            dist.all_reduce(hits)
            if rank == 0:
                print(f"round {rnd} loss {sums[0] / sums[1]:.4f} acc {hits[0] / hits[1]:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Settings())
    dist.barrier()
    dist.destroy_process_group()
