# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "DataParallel and DistributedDataParallel on one global batch: same loss and gradients, and why only one is for new code"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""DataParallel against DistributedDataParallel.

What it proves: a model is trained with DDP; then, on the same global batches, DataParallel in one process and DDP in all of them give the
same loss and the same gradients to rounding. Side by side: who splits the batch, whose keys carry `module.`, what becomes of state that is
changed in forward, how long a step takes, and on GPUs how much memory each device holds.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 dp_vs_ddp.py
    python dp_vs_ddp.py                                    DDP in a world of one; DataParallel over all GPUs, if there are any
Without a GPU DataParallel hands its input through to the module; the script says so and checks what is left to check.

What goes wrong in practice, and why DataParallel is not for new code: it is one process (one GIL for all GPUs); every step copies the model
to every GPU and gathers the outputs on the first, which fills up while the others idle; whatever forward writes to `self` is lost on all
replicas but the first. Coming from it, these habits break DDP: giving every rank the whole batch (DataParallel split it, DDP does not: each
rank loads its own share); calling `model.module(x)` (DDP then never averages the gradients); keeping `nn.DataParallel` inside a
torchrun job (N processes, each training alone).
"""

import argparse
import copy
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 32


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


class Net(nn.Module):
    """A small regression net that counts the samples it has seen: state that is changed in forward."""

    num_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen += len(x)  # DataParallel: kept by the first replica only. DDP: each rank counts its own, rank 0's is broadcast
        return self.layers(x)


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=draw)
    return x, torch.tanh(x[:, :3].sum(1, keepdim=True))


def train(model: nn.Module, device: torch.device, seed: int) -> tuple[float, float]:
    """Four epochs with DDP: every rank loads its share of each global batch. Returns the mean loss of the first and the last epoch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = TensorDataset(*make_data(384, seed=1))
    sampler = DistributedSampler(dataset, world, rank, seed=seed)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    curve = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
    losses = torch.stack(curve)
    dist.all_reduce(losses)
    by_epoch = (losses / world).view(4, -1).mean(1).tolist()
    return by_epoch[0], by_epoch[-1]


def forward_backward(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and all gradients in one row; no step, so that both wrappers look at the same weights."""
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def compare(net: nn.Module, device: torch.device) -> list[str]:
    """The same four global batches through both. Rank 0 alone runs DataParallel: each such process would take every GPU of the node."""
    rank, world = dist.get_rank(), dist.get_world_size()
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    ddp = DistributedDataParallel(copy.deepcopy(net), device_ids=[device.index] if device.type == "cuda" else None)
    dp = DataParallel(copy.deepcopy(net), device_ids=list(range(num_gpus)) or None) if rank == 0 else None
    ms: dict[str, list[float]] = {"DataParallel": [], "DDP": []}
    size = GLOBAL_BATCH // world * world  # equal shares, or the mean over ranks is not the mean over samples
    worst_loss, worst_gradient = 0.0, 0.0
    for batch in range(4):
        x, y = (tensor.to(device) for tensor in make_data(size, seed=100 + batch))
        dist.barrier()
        begin = time.perf_counter()
        loss, gradients = forward_backward(ddp, x[rank::world], y[rank::world])  # a share each; DDP averages the gradients
        ms["DDP"].append(1e3 * (time.perf_counter() - begin))
        dist.all_reduce(loss)
        loss /= world
        if dp is not None:
            begin = time.perf_counter()
            dp_loss, dp_gradients = forward_backward(dp, x, y)  # the whole batch; DataParallel splits it over the GPUs
            ms["DataParallel"].append(1e3 * (time.perf_counter() - begin))
            worst_loss = max(worst_loss, abs(dp_loss.item() - loss.item()) / loss.item())
            worst_gradient = max(worst_gradient, ((dp_gradients - gradients).norm() / gradients.norm()).item())
    if dp is None:
        return []
    assert worst_loss < 1e-4, f"the losses of DataParallel and DDP must agree to 1e-4, they differ by {worst_loss:.1e}"
    assert worst_gradient < 1e-4, f"the gradients of DataParallel and DDP must agree to 1e-4, they differ by {worst_gradient:.1e}"

    counted = [int(model.module.num_seen - net.num_seen) for model in (dp, ddp)]
    expected = [4 * -(-size // max(num_gpus, 1)), 4 * size // world]
    assert counted == expected, f"samples counted in forward by DataParallel and by DDP: {counted}, expected {expected}"
    keys = {type(model).__name__: next(iter(model.state_dict())) for model in (dp, ddp)}
    assert all(key.startswith("module.") for key in keys.values()), f"both wrappers add `module.`, the keys are {keys}"
    lines = [
        f"same loss to {worst_loss:.0e} and same gradients to {worst_gradient:.0e} on 4 global batches of {size}",
        "a step: " + ", ".join(f"{name} {statistics.median(times[1:]):.2f} ms" for name, times in ms.items()),
        f"counted in forward, of {4 * size} samples: DataParallel {counted[0]}, DDP {counted[1]} a rank",
    ]
    if num_gpus == 0:
        return [*lines, "no GPU: DataParallel was a pass-through, its splitting, its copies and its memory on device 0 were not exercised"]
    used = [f"cuda:{index} {torch.cuda.max_memory_allocated(index) / 2**20:.1f} MiB" for index in range(num_gpus)]
    return [*lines, f"peak memory of this process over {num_gpus} GPUs: {', '.join(used)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="DataParallel against DDP", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = start(args.device)

    torch.manual_seed(args.seed)
    net = Net().to(device)  # first moved, then wrapped, then given to an optimizer
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    first, last = train(model, device, args.seed)
    assert last < 0.7 * first, f"loss must fall by 30 %: first epoch {first:.4f}, last {last:.4f}"
    lines = compare(net, device)
    if dist.get_rank() == 0:
        print(f"DDP, {dist.get_world_size()} ranks on {device.type}: loss {first:.4f} -> {last:.4f}", *lines, sep="\n")
    dist.barrier()  # rank 0 has compared alone; leave together
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
