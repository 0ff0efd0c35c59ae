# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "every collective checked against arithmetic and timed, then data-parallel training made of them by hand"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
# backend = "--backend {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Collectives: are they right, how fast are they, and what DDP does with them.

What it proves: on this machine's backend every collective returns what arithmetic says it must, on inputs that differ by rank; the
bandwidth of the large ones is printed; and broadcast + all_reduce alone, written by hand, train one model on all ranks as DDP would.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 collectives.py
    torchrun --standalone --nproc-per-node 2 collectives.py --backend gloo --mib 64
    python collectives.py                                  a world of one: every collective is a copy

What goes wrong in practice: a collective has no name, only a place in the queue. The n-th call of one rank meets the n-th call of the
others, whatever it was meant for. So a collective that one rank skips, adds or reorders does not fail there: it pairs with the wrong
partner and returns wrong numbers, or hangs much later. Three rules keep out of trouble: every rank makes the same calls in the same
order, with the same shapes and dtypes; no collective stands under a condition that ranks may answer differently; what is summed is divided.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def start(device_option: str, backend_option: str) -> torch.device:
    """Join the job that torchrun made, or be a job of one under plain `python`. NCCL needs a GPU for each rank; else gloo on the CPU."""
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= local_world
    if device_option == "cuda" and not enough_gpus:
        raise SystemExit(f"--device cuda: {local_world} ranks on this node, {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank) if enough_gpus and device_option != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = backend_option if backend_option != "auto" else "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def expect(name: str, got: Tensor, want: list[float]) -> None:
    assert got.tolist() == want, f"rank {dist.get_rank()}: {name} returned {got.tolist()}, arithmetic says {want}"


def check_each(device: torch.device) -> int:
    """Rank r brings r + 1, so that a missing, doubled or misplaced contribution changes the answer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = [float(r + 1) for r in range(world)]
    mine = torch.tensor([rank + 1.0], device=device)
    row = torch.tensor([10.0 * rank + column for column in range(world)], device=device)  # row r of a world x world table
    empty = [torch.empty(1, device=device) for _ in range(world)]

    dist.all_reduce(total := mine.clone(), op=dist.ReduceOp.SUM)
    expect("all_reduce(SUM)", total, [sum(everyone)])
    dist.all_reduce(largest := mine.clone(), op=dist.ReduceOp.MAX)
    expect("all_reduce(MAX)", largest, [float(world)])
    dist.broadcast(sent := mine.clone(), src=world - 1)
    expect("broadcast", sent, [float(world)])
    dist.reduce(at_root := mine.clone(), dst=0)
    if rank == 0:  # on the other ranks the content is undefined: never read it there
        expect("reduce", at_root, [sum(everyone)])
    dist.all_gather(empty, mine)
    expect("all_gather", torch.cat(empty), everyone)
    dist.gather(mine, empty if rank == 0 else None, dst=0)  # every rank calls; only the root brings the list
    dist.scatter(part := torch.empty(1, device=device), list(row.split(1)) if rank == 0 else None, src=0)
    expect("scatter", part, [float(rank)])
    dist.reduce_scatter(column_sum := torch.empty(1, device=device), list(row.split(1)))
    expect("reduce_scatter", column_sum, [sum(10.0 * r + rank for r in range(world))])
    dist.all_to_all_single(column := torch.empty_like(row), row)
    expect("all_to_all", column, [10.0 * r + rank for r in range(world)])
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})  # pickles: fine for a line of text, slow for tensors
    assert objects == [{"rank": r} for r in range(world)], f"all_gather_object returned {objects} in a world of {world}"
    if world > 1:  # a ring; batched, because a blocking send on every rank at once waits for ever where the backend has no buffer
        received = torch.empty(1, device=device)
        ring = [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        expect("send/recv ring", received, [float((rank - 1) % world + 1)])
    dist.barrier()
    return 11 if world > 1 else 10


def measure_each(device: torch.device, mib: float) -> list[str]:
    """Bus bandwidth as nccl-tests count it: bytes that must cross each link, so that figures of different world sizes compare."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = max(int(mib * 2**20 / 4) // world, 1) * world
    whole, other = torch.ones(numel, device=device), torch.empty(numel, device=device)
    parts, pieces = list(whole.split(numel // world)), list(other.split(numel // world))
    share = (world - 1) / world
    timed: dict[str, tuple[float, Callable[[], object]]] = {
        "broadcast": (1.0 if world > 1 else 0.0, lambda: dist.broadcast(other, src=0)),
        "all_reduce": (2 * share, lambda: dist.all_reduce(other, op=dist.ReduceOp.MAX)),  # MAX: repeated SUMs would overflow
        "all_gather": (share, lambda: dist.all_gather(pieces, parts[rank])),
        "reduce_scatter": (share, lambda: dist.reduce_scatter(pieces[rank], parts)),
        "all_to_all": (share, lambda: dist.all_to_all_single(other, whole)),
    }
    lines = []
    for name, (factor, call) in timed.items():
        seconds = []
        for _ in range(6):
            dist.barrier()  # start together: otherwise the clock measures who came late
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # NCCL calls return when they are queued
            seconds.append(time.perf_counter() - begin)
        slowest = torch.tensor([statistics.median(seconds[1:])], device=device)  # the first call sets up connections
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        lines.append(f"{name:15s} {slowest.item() * 1e3:8.2f} ms  {4e-9 * numel * factor / slowest.item():7.2f} GB/s")
    return lines


def train_by_hand(device: torch.device, seed: int) -> tuple[list[float], list[float]]:
    """What DistributedSampler does, with batches for samples, and DistributedDataParallel, without its overlap of communication and backward.
    Returns loss by step, error by epoch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(320, 16, generator=draw)
    targets = torch.tanh(inputs @ torch.randn(16, 1, generator=draw))
    size = 32 // world
    num_batches = len(inputs) // size // world  # a rank: as many as the others have
    order = torch.Generator().manual_seed(seed)  # alike on all ranks, and nothing else draws from it: they deal out one permutation

    torch.manual_seed(seed + rank)  # different on purpose: the broadcast below has something to do
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    curve, errors = [], []
    for _ in range(3):
        share = torch.randperm(num_batches * world, generator=order)[rank::world].tolist()
        error_sum, num_samples = torch.zeros((), device=device), torch.zeros((), device=device)
        for number in share:
            x, y = (tensor[number * size : (number + 1) * size].to(device) for tensor in (inputs, targets))
            prediction = model(x)
            loss = F.mse_loss(prediction, y)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():  # one call each is clear; DDP packs them into 25 MB buckets, which is faster
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # after the reduction: the norm of the whole batch
            optimizer.step()
            curve.append(loss.detach())
            error_sum += (prediction.detach() - y).abs().sum()
            num_samples += len(x)
        dist.all_reduce(error_sum)
        dist.all_reduce(num_samples)
        errors.append((error_sum / num_samples).item())
    losses = torch.stack(curve)
    dist.all_reduce(losses)  # the whole curve in one call
    losses /= world
    return losses.tolist(), errors


def main() -> None:
    parser = argparse.ArgumentParser(description="collectives: correctness, bandwidth, use", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", default="auto", help="gloo, nccl, ...; auto takes the one that fits the device")
    parser.add_argument("--mib", type=float, default=2.0, help="size of the tensors that are timed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = start(args.device, args.backend)

    num_checked = check_each(device)
    lines = measure_each(device, args.mib)
    losses, errors = train_by_hand(device, args.seed)
    first, last = statistics.mean(losses[:10]), statistics.mean(losses[-10:])
    assert last < 0.6 * first, f"loss must fall by 40 %: mean of the first ten steps {first:.4f}, of the last ten {last:.4f}"
    if dist.get_rank() == 0:
        print(f"{num_checked} collectives right on {dist.get_backend()}, {dist.get_world_size()} ranks on {device.type}")
        print(f"{args.mib:g} MiB a call, median of 5, slowest rank:", *lines, sep="\n  ")
        print(f"trained by hand: loss {first:.4f} -> {last:.4f}, error by epoch", ", ".join(f"{error:.3f}" for error in errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
