# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "memory stays flat over training and evaluation, and is what arithmetic says"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Memory: how much a training needs, and that it does not grow.

What it proves: parameters, gradients and optimizer state take the bytes that arithmetic predicts; the activations saved for backward are
counted; after the first epoch memory no longer grows, neither in training nor in evaluation, and graphs do not outlive their step.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 memory_growth.py
    torchrun --standalone --nproc-per-node 2 memory_growth.py --epochs 50 --budget-mib 16
    python memory_growth.py

What goes wrong in practice: `losses.append(loss)` or `total += loss` keeps the graph of every step, because a loss is the last node of
its graph. After backward that is some kilobytes a step; where no backward follows, as in evaluation without `torch.no_grad()`, it is every
activation of every batch. Or a list of batches "for later", a forward hook that appends, a cache without a bound, a block of shared
memory a batch that is closed and never unlinked. On a GPU it ends in an out-of-memory error after hours; on a CPU the machine swaps first.
For graphs the cure is one word: `detach()` for a tensor that stays on the device, `item()` for a number.
"""

import argparse
import gc
import os
import struct
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

MIB = 2**20


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


def memory_bytes(device: torch.device) -> int:
    """Of this process: what CUDA tensors hold there, else the resident set. The allocator's cache is not a leak, so not memory_reserved."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the peak is the next best, and enough to see growth
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def num_graph_tensors() -> int:
    """Tensors that still hold a graph: the last loss and a few of DDP's own, not one a step. Walks the heap, 0.1 s, so only at the end."""
    return sum(1 for item in gc.get_objects() if issubclass(type(item), Tensor) and item.grad_fn is not None)


def tensor_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def saved_bytes(net: nn.Module, x: Tensor) -> int:
    """What autograd keeps for backward in one step, parameters excluded: this grows with the batch, all else does not."""
    own = {parameter.data_ptr() for parameter in net.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> None:  # keeps nothing: there will be no backward
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        net(x)
    return sum(saved.values())


def make_data(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 64, generator=draw)
    return TensorDataset(x, torch.tanh(x[:, :4].sum(1, keepdim=True)))


@torch.no_grad()
def evaluate(net: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    net.eval()
    error_sum, num_samples = 0.0, torch.tensor(0.0, device=device)
    for x, y in DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=64):
        error_sum += F.mse_loss(net(x.to(device)), y.to(device), reduction="sum")
        num_samples += len(x)
    net.train()
    totals = torch.stack([torch.as_tensor(error_sum, device=device).detach(), num_samples])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="memory that does not grow", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--budget-mib", type=float, default=96.0, help="growth allowed after the first epoch")
    args = parser.parse_args()
    device = start(args.device)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 1)).to(device)
    activation_bytes = saved_bytes(net, torch.randn(64, 64, device=device))
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_set, test_set = make_data(1536, seed=1), make_data(768, seed=2)
    sampler = DistributedSampler(train_set, world, rank, seed=args.seed)
    loader = DataLoader(train_set, batch_size=128 // world, sampler=sampler, drop_last=True)

    board = SharedMemory(create=True, size=8)  # the last test error, for a monitor to read: one block, written again and again
    history, by_epoch, test_errors = [], [], []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()  # set_to_none: between two steps the gradients take no memory of their own
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            history.append(loss.detach())
        test_errors.append(evaluate(net, test_set, device))
        struct.pack_into("d", board.buf, 0, test_errors[-1])
        by_epoch.append(memory_bytes(device))
        growth = by_epoch[-1] - by_epoch[0]
        if rank == 0:
            print(f"epoch {epoch}: test error {test_errors[-1]:.4f}, {by_epoch[-1] / MIB:.1f} MiB", flush=True)
        assert growth < args.budget_mib * MIB, f"rank {rank}: grew by {growth / MIB:.1f} MiB since epoch 0, allowed {args.budget_mib:g} MiB"

    board.close()  # this process's view; the block itself would stay in /dev/shm, with nobody left to count it
    board.unlink()

    parameters = list(net.parameters())
    state = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    assert tensor_bytes(state) == 2 * tensor_bytes(parameters), (
        f"Adam keeps two moments a parameter: expected {2 * tensor_bytes(parameters)} bytes, found {tensor_bytes(state)}"
    )
    assert test_errors[-1] < 0.7 * test_errors[0], f"test error must fall by 30 %: first {test_errors[0]:.4f}, last {test_errors[-1]:.4f}"
    if rank == 0:
        sizes = {"parameters": parameters, "gradients": parameters, "Adam state": state}
        print(", ".join(f"{name} {tensor_bytes(tensors) / MIB:.2f} MiB" for name, tensors in sizes.items()), end=", ")
        print(f"activations {activation_bytes / MIB:.2f} MiB at 64 samples a rank")
        print(f"tensors that hold a graph after {len(history)} steps: {num_graph_tensors()}; memory grew by {growth / MIB:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
