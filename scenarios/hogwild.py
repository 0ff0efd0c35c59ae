# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 1
# device = "cpu"
# timeout_s = 120
# summary = "shared-memory training by several processes without locks, against one process; what is lost, what is shared"
#
# [tool.harness.args]
# seed = "--seed {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Hogwild: several processes train one model in shared memory, without locks (Niu et al., 2011).

What it proves: with `share_memory()` the workers' steps land in one set of weights, which the parent sees; together they come as far as one
process does with the same number of steps; shared tensors are *not* locked (a lost update is made on purpose, and the rate of accidental
ones is measured against a lock); gradients are private, the optimizer has no state; nothing stays behind in /dev/shm; shared pages are
counted once (PSS), where the sum of the RSS counts them once a process.

How to run it bare:
    python hogwild.py
    python hogwild.py --workers 4 --start-method spawn       or forkserver: each worker imports torch anew, which takes seconds

What goes wrong in practice: `share_memory()` forgotten under fork, so that each worker trains a copy and the parent's model never changes;
an optimizer built on a local copy, or `p.data = ...`, which rebinds where it should write in place; gradients that were allocated before
`share_memory()`, so that workers overwrite each other's; a fork after the parent has used several threads, which leaves a child hanging in
its first matmul; Adam, whose state each worker keeps to itself; a /dev/shm of 64 MB in a container. Never print or save from the workers
what you mean of the shared model: it changes while you read.
"""

import argparse
import multiprocessing.synchronize
import os
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # the first optimizer step imports it, for seconds: here once, in the parent, and forked workers inherit it
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

MIB, NUM_UNLOCKED, NUM_LOCKED = 2**20, 20_000, 2_000
SHM = Path("/dev/shm")


class Report(NamedTuple):
    """What a worker tells the parent: plain numbers, since tensors in a queue would be more shared memory."""

    pid: int
    first_loss: float
    last_loss: float
    gradients_shared: bool
    rss_bytes: int
    pss_bytes: int
    uss_bytes: int


def memory_bytes() -> tuple[int, int, int]:
    """RSS counts every shared page in full, PSS divides it by its number of users, USS leaves it out."""
    try:
        import psutil

        info = psutil.Process().memory_full_info()
        return info.rss, getattr(info, "pss", info.rss), info.uss
    except ImportError:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kib["Rss"] * 1024, kib["Pss"] * 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) * 1024


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """28 x 28 grey images of ten classes, as MNIST has: a smooth pattern a class, shifted and noisy."""
    patterns = torch.randn(10, 1, 7, 7, generator=torch.Generator().manual_seed(10))
    patterns = F.interpolate(patterns, size=(28, 28), mode="bilinear").squeeze(1)
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    shifts = torch.randint(-2, 3, (count, 2), generator=draw).tolist()
    images = torch.stack([patterns[label].roll(shift, (0, 1)) for label, shift in zip(labels.tolist(), shifts, strict=True)])
    return images + torch.randn(images.shape, generator=draw), labels


def shared_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    model.share_memory()  # before the workers start, and before there are gradients: those would be shared as well
    return model


def train(model: nn.Module, images: Tensor, labels: Tensor, num_epochs: int) -> list[float]:
    """One worker's part. SGD without momentum: it has no state, so none can be private by mistake."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    losses = []
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()  # sets them to None: the next ones are this process's own
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()  # weights -= lr * gradient, in place in shared memory, no lock
            losses.append(loss.item())
    return losses


def count_up(cell: Tensor, times: int, lock: multiprocessing.synchronize.Lock | None) -> None:
    for _ in range(times):
        if lock is None:
            cell += 1  # read, add, write: three actions
        else:
            with lock:
                cell += 1


def worker(
    number: int,
    args: argparse.Namespace,
    num_workers: int,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    cells: Tensor,
    lock: multiprocessing.synchronize.Lock,
    barrier: multiprocessing.synchronize.Barrier,
    reports: "SimpleQueue[Report]",
) -> None:
    torch.manual_seed(args.seed + 1 + number)  # another shuffle in each worker
    images, labels = (tensor[number::num_workers] for tensor in data)  # its own share: together one pass over the data an epoch
    losses = train(model, images, labels, args.epochs)

    barrier.wait()
    count_up(cells[0], NUM_UNLOCKED, None)
    count_up(cells[1], NUM_LOCKED, lock)
    if num_workers > 1 and number < 2:  # the proof that nothing locks: both add 1 to the same cell, and one addition vanishes
        before = cells[2].clone()
        barrier.wait()  # both have read
        cells[2] = before + 1
    elif num_workers > 1:
        barrier.wait()
    gradients_shared = any(parameter.grad is not None and parameter.grad.is_shared() for parameter in model.parameters())
    barrier.wait()  # measure while all are alive, or the last one pays for all shared pages
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    reports.put(Report(os.getpid(), first, last, gradients_shared, *memory_bytes()))
    barrier.wait()


def run(args: argparse.Namespace, num_workers: int, model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[list[Report], Tensor]:
    context = mp.get_context(args.start_method)
    cells = torch.zeros(3, dtype=torch.float64).share_memory_()
    lock, barrier, reports = context.Lock(), context.Barrier(num_workers), context.SimpleQueue()
    processes = [
        context.Process(target=worker, args=(number, args, num_workers, model, data, cells, lock, barrier, reports))
        for number in range(num_workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    exit_codes = [process.exitcode for process in processes]
    assert exit_codes == [0] * num_workers, f"all {num_workers} workers must end with 0, they ended with {exit_codes}"
    return [reports.get() for _ in processes], cells


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description="hogwild: shared memory, no locks", allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--start-method", choices=["fork", "spawn", "forkserver"], default="fork")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by spawned workers; forked ones inherit the next line: N workers share the cores
    torch.set_num_threads(1)  # and a child forked after its parent has used several threads hangs in its first matmul
    data, test_data = digits(1280, seed=1), digits(500, seed=2)
    for tensor in data:
        tensor.share_memory_()  # spawn would do it on the way; done here, the start methods differ in nothing but speed
    model, alone = shared_model(args.seed), shared_model(args.seed)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in [*data, *model.parameters(), *alone.parameters()])
    free_bytes = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    assert free_bytes > num_bytes // 10, f"{SHM} is full: {free_bytes / MIB:.1f} MiB are free, {num_bytes / MIB:.1f} MiB were shared"
    untrained = evaluate(model, *test_data)

    (single,), _ = run(args, 1, alone, data)  # in a worker too: on a GPU machine even a CPU backward starts threads, which no fork survives
    reports, cells = run(args, args.workers, model, data)
    last_loss = sum(report.last_loss for report in reports) / args.workers
    assert last_loss < 0.7 * single.first_loss, f"loss must fall by 30 %: {single.first_loss:.4f} at first, {last_loss:.4f} at last"
    assert last_loss < single.last_loss + 0.4, f"hogwild must come near one process: {last_loss:.4f} against {single.last_loss:.4f}"

    unlocked, locked, raced = (int(cell) for cell in cells)
    lost = 1 - unlocked / (NUM_UNLOCKED * args.workers)
    assert locked == NUM_LOCKED * args.workers, f"under a lock no update is lost: {locked} of {NUM_LOCKED * args.workers} arrived"
    assert args.workers == 1 or raced == 1, f"two processes read 0 and wrote 0 + 1: expected 1 without locks, found {raced}"
    left = [path.name for path in SHM.glob("torch_*") if any(path.name.startswith(f"torch_{report.pid}_") for report in reports)]
    assert not left, f"{SHM} must hold nothing of {args.workers} workers that ended, found {len(left)}: {left[:3]}"
    rss, pss, uss = (sum(report[column] for report in reports) / MIB for column in (4, 5, 6))
    assert pss <= rss, f"pages shared are counted once: sum of PSS {pss:.1f} MiB, of RSS {rss:.1f} MiB"

    print(f"{args.workers} workers by {args.start_method}: loss {last_loss:.4f}, one process {single.last_loss:.4f}")
    print(f"accuracy: untrained {untrained:.3f}, one process {evaluate(alone, *test_data):.3f}, hogwild {evaluate(model, *test_data):.3f}")
    gradients = "shared" if any(report.gradients_shared for report in reports) else "private"
    print(f"gradients are {gradients}; updates lost without a lock: {100 * lost:.3f} %, with a lock: 0 %")
    print(f"memory of the workers: RSS {rss:.0f} MiB, PSS {pss:.0f} MiB, USS {uss:.0f} MiB")


if __name__ == "__main__":
    main()
