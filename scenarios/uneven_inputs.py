# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "ranks with unequal numbers of batches: Join, agreeing on the smallest count, exact evaluation"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Uneven inputs: what to do when one rank has fewer batches than the others.

What it proves: a data set of documents that is filtered by each rank leaves unequal shares. Three ways to train on them all end, without a
hang and with equal replicas: agree on the smallest count; `Join`, which lets early ranks shadow the collectives of late ones; and for
evaluation no collective inside the loop at all, one sum at the end, so that unequal shares are counted exactly.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 uneven_inputs.py
    torchrun --standalone --nproc-per-node 3 uneven_inputs.py
    python uneven_inputs.py

What goes wrong in practice: rank 1 runs out first and goes on to the next barrier, rank 0 waits in the gradient all-reduce: a hang until
the timeout half an hour later, or "connection closed by peer" from the rank that did nothing wrong. A rank-local `continue` (a bad sample,
a NaN) does the same, but silently until the end: from then on gradients of different batches are averaged. And a mean of means weighs a
rank with four samples like one with twelve: gradients are off by tens of percent, and no number looks wrong.
"""

import argparse
import os
from collections.abc import Iterable
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


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


def documents(count: int, seed: int) -> TensorDataset:
    """Bags of words with a length each; the class is which half of the vocabulary is used more."""
    draw = torch.Generator().manual_seed(seed)
    bags = torch.poisson(torch.rand(count, 20, generator=draw) * 3, generator=draw)
    return TensorDataset(bags, (bags[:, :10].sum(1) > bags[:, 10:].sum(1)).long())


def my_long_documents(count: int, seed: int) -> TensorDataset:
    """This rank's share, then a filter: from here on no rank knows how many samples the others have left."""
    rank, world = dist.get_rank(), dist.get_world_size()
    bags, labels = (tensor[rank::world] for tensor in documents(count, seed).tensors)
    threshold = 20 + 2 * rank  # the crawl behind rank 1 has shorter documents; exaggerated, so that the shares differ for certain
    keep = bags.sum(1) >= threshold
    return TensorDataset(bags[keep], labels[keep])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, bags: Tensor, labels: Tensor) -> Tensor:
    device = next(model.parameters()).device
    optimizer.zero_grad()
    loss = F.cross_entropy(model(bags.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
    return loss.detach()


def smallest_over_ranks(number: int, device: torch.device) -> int:
    smallest = torch.tensor(number, device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return int(smallest.item())


@torch.no_grad()
def evaluate(net: nn.Module, batches: Iterable[list[Tensor]], device: torch.device) -> tuple[float, int]:
    """Sums, not means, and one collective after the loop: the shares may be as uneven as they like."""
    net.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for bags, labels in batches:
        correct = (net(bags.to(device)).argmax(1) == labels.to(device)).sum()
        totals += torch.stack([correct, torch.tensor(len(labels), device=device)])
    net.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item(), int(totals[1].item())


def largest_difference(net: nn.Module) -> float:
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    dist.all_reduce(highest := flat.clone(), op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest := flat.clone(), op=dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="uneven inputs", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = start(args.device)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # no momentum: Join makes parameters equal again, not optimizer state
    share = my_long_documents(1280, seed=1)
    order = torch.Generator().manual_seed(args.seed * world + rank)
    # drop_last: batches of one size, because only then is the mean over ranks the mean over samples
    loader = DataLoader(share, batch_size=24, shuffle=True, drop_last=True, generator=order)
    losses = []

    for _ in range(2):  # first way: all agree on the smallest count. Some samples wait for a later epoch, every step is a full one
        num_batches = smallest_over_ranks(len(loader), device)
        for bags, labels in islice(loader, num_batches):
            losses.append(train_step(model, optimizer, bags, labels))

    for _ in range(2):  # second way: every sample is used; a rank that has run out answers the others' collectives with zeros
        with Join([model], divide_by_initial_world_size=False):  # divide by the ranks that still train, or late steps shrink
            for bags, labels in loader:
                losses.append(train_step(model, optimizer, bags, labels))

    test_set = documents(403, seed=2)
    bags, labels = (tensor[rank::world] for tensor in test_set.tensors)
    accuracy, num_tested = evaluate(net, DataLoader(TensorDataset(bags, labels), batch_size=48), device)
    counts: list[list[int]] = [[] for _ in range(world)]
    dist.all_gather_object(counts, [len(loader), len(share)])
    batches, samples = zip(*counts, strict=True)  # from a pair a rank to a list of each; without `strict` it ends with the shortest
    difference = largest_difference(net)
    first, last = torch.stack(losses[:8]).mean().item(), torch.stack(losses[-8:]).mean().item()
    assert world == 1 or min(batches) < max(batches), f"the shares must be uneven to prove anything: batches by rank {batches}"
    assert num_tested == len(test_set), f"each test sample must count once: {num_tested} counted, the set has {len(test_set)}"
    assert last < 0.7 * first, f"rank {rank}: loss must fall by 30 %: first eight steps {first:.4f}, last eight {last:.4f}"
    if rank == 0:
        print(f"batches by rank {batches}, of {samples} documents")
        print(f"accuracy {accuracy:.3f} on {num_tested} samples; replicas differ by {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
