# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "every sample once, on one rank, in a new order each epoch: samplers, batch samplers, streams, workers, resume"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Who reads which sample: DistributedSampler, batch samplers, iterable datasets, workers and resume in mid-epoch.

What it proves: the ranks' shares are disjoint and cover the data once an epoch; each epoch has another order; padding adds and drop_last
drops exactly what arithmetic says; a bucketing batch sampler and a stream are split over ranks *and* workers; workers draw different noise
on every rank; a job that stops in mid-epoch goes on with the samples that it had not seen. One model is trained from all three sources.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 distributed_sampler.py
    python distributed_sampler.py                          a world of one, the same code
    torchrun --standalone --nproc-per-node 2 distributed_sampler.py --sources buckets

What goes wrong in practice, all of it silently: no sampler, or a batch sampler or stream that never looks at the rank (every rank trains
on the same samples: N GPUs do the work of one); `set_epoch` forgotten (one order for ever, also after a resume); a sampler seed that
differs by rank (shares overlap, some samples are never seen); one generator seed for all loaders (every rank draws the same noise);
persistent workers that hold the dataset's old epoch; a padded sampler in evaluation (the last samples count twice).
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset, get_worker_info

Sample = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]
FEATURES, NUM_SAMPLES, GLOBAL_BATCH = 12, 320, 32


def start(device_option: str) -> torch.device:
    """Join the job that torchrun made, or be a job of one under plain `python`. NCCL needs a GPU for each rank; else gloo on the CPU."""
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= local_world
    if device_option == "cuda" and not enough_gpus:
        raise SystemExit(f"--device cuda: {local_world} ranks on this node, {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank) if enough_gpus and device_option != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def make_sample(number: int) -> Sample:
    """A smooth function of twelve numbers, drawn from the sample's number alone: the same for whoever asks."""
    x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(number))
    return x, torch.tanh(x[:4].sum() - x[4:8].sum())


class NoisySamples(Dataset[Sample]):
    """Augmentation by torch's global generator, which the loader seeds in each worker with (base seed + worker id)."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        x, y = make_sample(index)
        return x + 0.05 * torch.randn(FEATURES), y


class WorkerSeeds(NoisySamples):
    def __getitem__(self, index: int) -> Sample:
        return torch.tensor(index), torch.tensor(torch.initial_seed())


class ResumableSampler(DistributedSampler[Sample]):
    """A DistributedSampler that can leave out what this rank has consumed already in this epoch."""

    consumed = 0

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[self.consumed :])

    def __len__(self) -> int:
        return self.num_samples - self.consumed


class LengthBuckets(Sampler[list[int]]):
    """Batches of samples of like length. Every rank builds the same list of batches and takes each world-th of it."""

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        self.num_samples, self.batch_size, self.rank, self.world, self.seed, self.epoch = num_samples, batch_size, rank, world, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(1000 * self.seed + self.epoch)  # not the rank: the list must be the same everywhere
        order = sorted(torch.randperm(self.num_samples, generator=draw).tolist(), key=lambda index: index % 4)  # stands for a length
        batches = [order[first : first + self.batch_size] for first in range(0, self.num_samples, self.batch_size)]
        shuffled = torch.randperm(len(self) * self.world, generator=draw).tolist()
        return iter([batches[number] for number in shuffled[self.rank :: self.world]])

    def __len__(self) -> int:
        return self.num_samples // self.batch_size // self.world  # the same on every rank, or one of them waits for ever


class Stream(IterableDataset[Sample]):
    """A source without an index. Every worker of every rank holds a copy of it, so it must ask for both."""

    def __init__(self, num_samples: int, rank: int = 0, world: int = 1) -> None:
        self.num_samples, self.rank, self.world, self.epoch = num_samples, rank, world, 0

    def numbers(self) -> range:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        stride = self.world * num_workers
        end = self.num_samples // stride * stride  # equal shares, or the ranks take unequal numbers of steps
        return range(self.rank * num_workers + worker_id, end, stride)

    def __iter__(self) -> Iterator[Sample]:
        return (make_sample((self.epoch + 1) * self.num_samples + number) for number in self.numbers())


def gather(mine: Iterable[int]) -> list[list[int]]:
    """Every rank's share, in rank order. A collective: all ranks call it."""
    shares: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, list(mine))
    return shares


def check_cover(name: str, mine: Iterable[int], num_samples: int) -> list[int]:
    numbers = list(chain(*gather(mine)))
    assert len(set(numbers)) == len(numbers), f"{name}: shares overlap, {len(numbers)} drawn but {len(set(numbers))} distinct"
    assert sorted(numbers) == list(range(num_samples)), f"{name}: {len(numbers)} samples covered, the data set has {num_samples}"
    return numbers


def check_samplers(rank: int, world: int, seed: int) -> list[str]:
    size = 48 * world
    sampler = DistributedSampler(range(size), world, rank, seed=seed)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(check_cover("DistributedSampler", sampler, size))
    num_same = sum(a == b for a, b in zip(*orders, strict=True))
    assert num_same < size // 2, f"epochs 0 and 1 must differ in order: {num_same} of {size} positions are the same"
    check_cover("LengthBuckets", chain(*LengthBuckets(size, 8, rank, world, seed)), size)
    check_cover("Stream", Stream(size, rank, world).numbers(), size)

    whole, rest = DistributedSampler(range(size), world, rank, seed=seed), ResumableSampler(range(size), world, rank, seed=seed)
    rest.consumed = 20
    whole.set_epoch(7)
    rest.set_epoch(7)
    all_of_it, tail = list(whole), list(rest)
    assert all_of_it[20:] == tail, f"after a resume {len(tail)} samples must be the last {size // world - 20} of the epoch, in that order"

    odd = 48 * world + 1  # does not divide: training pads or drops, evaluation can afford neither
    padded = sum(len(share) for share in gather(DistributedSampler(range(odd), world, rank, seed=seed)))
    kept = sum(len(share) for share in gather(DistributedSampler(range(odd), world, rank, seed=seed, drop_last=True)))
    check_cover("strided share", range(rank, odd, world), odd)  # uneven by one, so no collective inside an evaluation loop
    assert padded == -(-odd // world) * world, f"padding must round {odd} up to a multiple of {world}, got {padded}"
    assert kept == odd // world * world, f"drop_last must round {odd} down to a multiple of {world}, got {kept}"
    return [f"{size} samples covered once by sampler, buckets and stream", f"{odd} samples: {padded} when padded, {kept} with drop_last"]


def check_workers(rank: int, world: int, seed: int) -> str:
    own = torch.Generator().manual_seed(seed * world + rank)
    loader = DataLoader(Subset(WorkerSeeds(), range(rank, 4 * world, world)), batch_size=2, num_workers=2, generator=own)
    seeds = list(chain(*gather(int(value) for _, batch in loader for value in batch.unique())))
    assert len(set(seeds)) == 2 * world, f"{2 * world} workers must have {2 * world} seeds, found {len(set(seeds))}"
    return f"{2 * world} workers, {len(set(seeds))} different seeds"


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    device = next(model.parameters()).device
    optimizer.zero_grad()
    loss = F.mse_loss(model(x.to(device)).squeeze(1), y.to(device))
    loss.backward()
    optimizer.step()
    return loss.detach()  # not the loss itself: that would keep every graph alive


def from_sampler(step: Step, rank: int, world: int, seed: int) -> list[Tensor]:
    """Two epochs with a worker, then the rest of a third, as in a job that was stopped after four of its batches."""
    dataset, batch_size, curve = NoisySamples(), GLOBAL_BATCH // world, []
    sampler = DistributedSampler(dataset, world, rank, seed=seed)
    noise = torch.Generator().manual_seed(seed * world + rank)  # seeds the workers: others on each rank
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=1, generator=noise)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            curve.append(step(x, y))

    rest = ResumableSampler(dataset, world, rank, seed=seed)
    rest.consumed = 4 * batch_size
    rest.set_epoch(2)
    for x, y in DataLoader(dataset, batch_size, sampler=rest):
        curve.append(step(x, y))
    return curve


def from_buckets(step: Step, rank: int, world: int, seed: int) -> list[Tensor]:
    buckets, curve = LengthBuckets(NUM_SAMPLES, GLOBAL_BATCH // world, rank, world, seed), []
    bucket_loader = DataLoader(NoisySamples(), batch_sampler=buckets)
    for epoch in range(3, 5):
        buckets.set_epoch(epoch)
        for x, y in bucket_loader:
            curve.append(step(x, y))
    return curve


def from_stream(step: Step, rank: int, world: int, seed: int) -> list[Tensor]:
    stream, curve = Stream(NUM_SAMPLES, rank, world), []
    stream_loader = DataLoader(stream, GLOBAL_BATCH // world, num_workers=2)
    for epoch in range(5, 7):
        stream.epoch = epoch  # reaches the workers because they are made anew each epoch; persistent ones would keep the old value
        for x, y in stream_loader:
            curve.append(step(x, y))
    return curve


SOURCES = {"sampler": from_sampler, "buckets": from_buckets, "stream": from_stream}


def check_learning(curve: list[Tensor], world: int) -> str:
    losses = torch.stack(curve)
    dist.all_reduce(losses)  # one collective for the whole curve; the mean over ranks is right because all batches are of one size
    losses /= world
    first, last = losses[:10].mean().item(), losses[-10:].mean().item()
    assert last < 0.7 * first, f"loss must fall by 30 %: mean of the first ten steps {first:.4f}, of the last ten {last:.4f}"
    return f"loss {first:.4f} -> {last:.4f} in {len(losses)} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description="samplers, batch samplers, streams, workers, resume", allow_abbrev=False)
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=list(SOURCES), help="what to train from, in this order")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = start(args.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = check_samplers(rank, world, args.seed)
    if "sampler" in args.sources:  # the one whose workers draw
        lines.append(check_workers(rank, world, args.seed))

    torch.manual_seed(args.seed)  # the same weights everywhere
    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(args.seed * world + rank)  # from here on every rank draws its own noise
    step = partial(train_step, model, optimizer)
    lines.append(check_learning([loss for source in args.sources for loss in SOURCES[source](step, rank, world, args.seed)], world))
    if rank == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
