# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "several micro-batches a step: no_sync, scaling, and the last window that is shorter"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Gradient accumulation under DDP: a large batch in small pieces, synchronised once a step.

What it proves: micro-batches whose losses are divided by the window's length leave the gradient of the whole batch, also in the last
window of an epoch, which is shorter. Only the last micro-batch of a window synchronises; `no_sync` holds *forward and backward* of the
others, because DDP decides in the forward pass whether the next backward will communicate.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 gradient_accumulation.py
    python gradient_accumulation.py                        a world of one, the same code

What goes wrong in practice: the loss is not divided (a learning rate A times too large); the short last window is divided by A all the
same (too small a step, once an epoch) or dropped; `no_sync` is left out (correct, but A all-reduces a step), stands around `backward`
only (the same), or covers the last micro-batch too, by an index that is off by one: then each rank steps on a gradient of its own, and
they drift apart.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 16, 4
MICRO_BATCH, ACCUMULATE = 8, 4  # a rank's micro-batch, and how many of them make a step


def start(device_option: str) -> torch.device:
    """Join the job that torchrun made, or be a job of one under plain `python`. NCCL needs a GPU for each rank; else gloo on the CPU."""
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= local_world_size
    if device_option == "cuda" and not enough_gpus:
        raise SystemExit(f"--device cuda: {local_world_size} ranks on this node, {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank) if enough_gpus and device_option != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def samples(count: int, seed: int) -> TensorDataset:
    """Points whose class is a smooth function of their position."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.view(count, CLASSES, -1).sum(2).argmax(1))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def gradient(net: nn.Module, pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient that the pieces leave behind when each loss is divided by their number."""
    net.zero_grad()
    for x, y in pieces:
        (F.cross_entropy(net(x), y) / len(pieces)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def prove_scaling(seed: int) -> None:
    """On one small net, without DDP: the pieces of a full and of a short window leave the gradient of the whole."""
    torch.manual_seed(seed)
    net = build()
    x, y = samples(ACCUMULATE * MICRO_BATCH, seed).tensors
    for num_pieces in (ACCUMULATE, ACCUMULATE - 1):
        whole = [(x[: num_pieces * MICRO_BATCH], y[: num_pieces * MICRO_BATCH])]
        pieces = [(x[i : i + MICRO_BATCH], y[i : i + MICRO_BATCH]) for i in range(0, num_pieces * MICRO_BATCH, MICRO_BATCH)]
        one, many = gradient(net, whole), gradient(net, pieces)
        error = float((one - many).norm() / one.norm())
        assert error < 1e-5, f"{num_pieces} micro-batches: gradient differs from the whole batch by {error:.1e}, allowed 1e-05"


def train_epoch(model: DistributedDataParallel, loader: DataLoader[tuple[Tensor, ...]], optimizer: torch.optim.Optimizer) -> float:
    device = next(model.parameters()).device
    loss_sum = torch.zeros((), device=device)
    for number, (x, y) in enumerate(loader):
        first = number - number % ACCUMULATE
        window = min(ACCUMULATE, len(loader) - first)  # the last window of an epoch may be shorter
        last_of_window = number == first + window - 1
        with nullcontext() if last_of_window else model.no_sync():
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            (loss / window).backward()
        loss_sum += loss.detach()
        if last_of_window:
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / len(loader) / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description="gradient accumulation", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    prove_scaling(args.seed)

    data = samples(144 * world_size, args.seed)  # 18 micro-batches a rank: four windows of four, and one of two
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(data, MICRO_BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(build().to(device), [device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses.append(train_epoch(model, loader, optimizer))
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, {-(-len(loader) // ACCUMULATE)} steps of {len(loader)} micro-batches", flush=True)
    assert args.epochs < 3 or losses[-1] < losses[0], f"the loss must fall: {losses[0]:.4f} in epoch 0, {losses[-1]:.4f} at the end"

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
