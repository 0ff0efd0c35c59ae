"""A small Accelerator: prepare(), accumulate(), gather_for_metrics(), is_main_process."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset


class ShardedBatchSampler:
    """Hands out whole batches in turn; a last round that is not complete is left out (even) or kept (not even)."""

    def __init__(self, batch_sampler, rank, world, even):
        self.bs, self.rank, self.world, self.even = batch_sampler, rank, world, even

    def __iter__(self):
        pending = []
        for batch in self.bs:
            pending.append(batch)
            if len(pending) == self.world:
                yield pending[self.rank]
                pending = []
        if pending and not self.even and self.rank < len(pending):
            yield pending[self.rank]

    def __len__(self):
        full, rest = divmod(len(self.bs), self.world)
        return full + (not self.even and self.rank < rest)


class Accelerator:
    def __init__(self, gradient_accumulation_steps=1):
        dist.init_process_group("gloo")
        self.process_index, self.num_processes = dist.get_rank(), dist.get_world_size()
        self.steps, self.count, self.sync_gradients = gradient_accumulation_steps, 0, True

    @property
    def is_main_process(self):
        return self.process_index == 0

    def print(self, *a):
        if self.is_main_process:
            print(*a)

    def prepare_loader(self, dataset, batch_size, shuffle, seed=0):
        g = torch.Generator()
        g.manual_seed(seed)  # the order is common property; who gets which batch is not
        inner = RandomSampler(dataset, generator=g) if shuffle else SequentialSampler(dataset)
        bs = BatchSampler(inner, batch_size, drop_last=shuffle)
        return DataLoader(dataset, batch_sampler=ShardedBatchSampler(bs, self.process_index, self.num_processes, even=shuffle))

    def prepare(self, model):
        return DDP(model)

    @contextlib.contextmanager
    def accumulate(self, model):
        self.count += 1
        self.sync_gradients = self.count % self.steps == 0
        with contextlib.nullcontext() if self.sync_gradients else model.no_sync():
            yield

    def backward(self, loss):
        (loss / self.steps).backward()

    def gather_for_metrics(self, t):
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.num_processes)]
        dist.all_gather(sizes, torch.tensor([len(t)]))
        longest = int(max(sizes))
        padded = torch.full((longest,), -1, dtype=t.dtype)
        padded[: len(t)] = t
        parts = [torch.empty_like(padded) for _ in range(self.num_processes)]
        dist.all_gather(parts, padded)
        return torch.cat([p[: int(n)] for p, n in zip(parts, sizes)])


class AcceleratedOptimizer:
    """step() and zero_grad() do nothing while gradients are being collected."""

    def __init__(self, opt, accelerator):
        self.opt, self.accelerator = opt, accelerator

    def step(self):
        if self.accelerator.sync_gradients:
            self.opt.step()

    def zero_grad(self):
        if self.accelerator.sync_gradients:
            self.opt.zero_grad()


def gaussians(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 5
    x = torch.randn(n, 8, generator=g) * 0.6
    x[torch.arange(n), y] += 2
    return TensorDataset(x, y)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    train = accelerator.prepare_loader(gaussians(384, 1), 8, shuffle=True)
    test = accelerator.prepare_loader(gaussians(75, 2), 8, shuffle=False)
    model = accelerator.prepare(model)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), accelerator)
    for epoch in range(3):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        preds, refs = [], []
        with torch.no_grad():
            for x, y in test:
                preds.append(model.module(x).argmax(-1))
                refs.append(y)
        p, r = accelerator.gather_for_metrics(torch.cat(preds)), accelerator.gather_for_metrics(torch.cat(refs))
        accelerator.print(f"epoch {epoch}: accuracy {(p == r).float().mean():.3f} on {len(r)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
