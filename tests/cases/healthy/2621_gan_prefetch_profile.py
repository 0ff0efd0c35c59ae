import argparse
import contextlib
import logging
import logging.handlers
import queue
import threading

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule


def start_logging(rank):
    lines = queue.Queue()
    root = logging.getLogger("gan")
    root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.addHandler(logging.handlers.QueueHandler(lines))
    out = [logging.StreamHandler()]
    if rank == 0:
        out.append(logging.FileHandler("gan.log", mode="w"))
    for h in out:
        h.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    listener = logging.handlers.QueueListener(lines, *out)
    listener.start()
    return root, listener


class Prefetcher:
    """A thread draws batches ahead into a bounded queue."""

    def __init__(self, make, depth=4):
        self.queue = queue.Queue(depth)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self.thread.start()

    def _run(self, make):
        while not self.stop.is_set():
            item = make()
            while not self.stop.is_set():
                try:
                    self.queue.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def next(self):
        return self.queue.get(timeout=60)

    def close(self):
        self.stop.set()
        self.thread.join()


class Ring:
    """Points on a ring of eight blobs."""

    def __init__(self, seed, batch):
        self.rng, self.batch = np.random.default_rng(seed), batch

    def __call__(self):
        k = self.rng.integers(8, size=self.batch)
        pts = np.stack([np.cos(k * np.pi / 4), np.sin(k * np.pi / 4)], 1) + 0.05 * self.rng.standard_normal((self.batch, 2))
        return torch.from_numpy(pts.astype(np.float32))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, o))


class PastFakes:
    """A bounded store of former samples, shown to the critic again (per rank)."""

    def __init__(self, limit, gen):
        self.limit, self.gen, self.data = limit, gen, torch.empty(0, 2)

    def swap(self, fake):
        if len(self.data) < self.limit:
            self.data = torch.cat([self.data, fake])[:self.limit]
            return fake
        idx = torch.randperm(self.limit, generator=self.gen)[:len(fake) // 2]
        old = self.data[idx].clone()
        self.data[idx] = fake[:len(idx)]
        return torch.cat([fake[len(idx):], old])


@torch.no_grad()
def coverage(gen_net, rank, world):
    z = torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))[rank::world]
    pts = gen_net(z)
    angle = torch.arange(8) * np.pi / 4
    centres = torch.stack([angle.cos(), angle.sin()], 1).float()
    d, k = torch.cdist(pts, centres).min(1)
    counts = torch.bincount(k[d < 0.3], minlength=8).float()
    dist.all_reduce(counts)
    return int((counts > 10).sum()), counts.sum().item() / 1000


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=400)
    ap.add_argument("--batch", type=int, default=64)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    log, listener = start_logging(rank)
    torch.manual_seed(21)
    g, d = DDP(mlp(4, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.99))
    noise = torch.Generator().manual_seed(2100 + rank)
    past = PastFakes(2048, noise)
    real_data = Prefetcher(Ring([21, rank], args.batch))
    plan = schedule(wait=5, warmup=2, active=3, repeat=1)
    prof = profile(activities=[ProfilerActivity.CPU], schedule=plan) if rank == 0 else contextlib.nullcontext()
    with prof as p:
        for step in range(args.steps):
            real = real_data.next()
            fake = g(torch.randn(args.batch, 4, generator=noise))
            shown = past.swap(fake.detach())
            d.requires_grad_(True)
            score = d(torch.cat([real, shown]))
            loss_d = F.softplus(-score[:len(real)]).mean() + F.softplus(score[len(real):]).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            d.requires_grad_(False)
            loss_g = F.softplus(-d.module(fake)).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            if p is not None and step < 12:
                p.step()
            if (step + 1) % 100 == 0:
                both = torch.stack([loss_d.detach(), loss_g.detach()])
                dist.all_reduce(both)
                modes, good = coverage(g.module, rank, world)
                log.info("step %d d %.3f g %.3f modes %d good %.2f past %d", step + 1, *(both / world).tolist(), modes, good, len(past.data))
    if rank == 0:
        with open("profile.txt", "w") as f:
            f.write(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))
    real_data.close()
    dist.barrier()
    listener.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
