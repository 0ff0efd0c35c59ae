# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "float16 autocast, one loss scale for all ranks, clipping in the right units"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Mixed precision under DDP: autocast, GradScaler and gradient clipping, in the one order that works.

What it proves: the gradient of a scaled loss, unscaled, is the gradient; an overflow on one rank reaches all ranks through the averaged
gradient, so that all skip the same step and keep the same scale without another word between them; the parameters stay float32; gradients
are unscaled before they are clipped. The order: scale(loss).backward(), unscale_, clip, step, update.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 mixed_precision.py
    python mixed_precision.py                              a world of one, the same code
float16 on GPUs and on the CPU; with `--bf16` bfloat16, which has float32's range, so that no scaler is needed (it is then switched off).

What goes wrong in practice: clipping before `unscale_` (the threshold is then 65,536 times too strict: every step has the length of the
threshold); a scale of its own on each rank; `model.half()` after wrapping, which replaces what DDP's hooks hang on: gradients are no
longer averaged; a rank that skips a batch by itself because its loss looks odd; the schedule stepped when the step was skipped; losses
kept with their graphs for a plot.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 16, 4
MAX_NORM = 1.0


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
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.view(count, CLASSES, -1).sum(2).argmax(1))


def build(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES)).to(device)


def prove_unscaling(device: torch.device, seed: int) -> None:
    """Powers of two change no digit of a float32: what comes back from the scaled loss is the gradient, bit by bit."""
    torch.manual_seed(seed)
    net = build(device)
    x, y = (tensor.to(device) for tensor in samples(32, seed).tensors)
    plain = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    scaled = torch.autograd.grad(F.cross_entropy(net(x), y) * 2.0**10, list(net.parameters()))
    error = max(float((b / 2.0**10 - a).abs().max()) for a, b in zip(plain, scaled, strict=True))
    assert error < 1e-7, f"the unscaled gradient is {error:.1e} away from the gradient, allowed 1e-07"


def prove_overflow_is_shared(device: torch.device) -> None:
    """One rank's infinity survives every mean, so each rank finds it in its own copy and skips the step for itself."""
    gradient = torch.full((4,), float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0, device=device)
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
    num_inf = int(torch.isinf(gradient).sum())
    assert num_inf == len(gradient), f"{num_inf} of {len(gradient)} averaged entries are infinite on rank {dist.get_rank()}"


def main() -> None:
    parser = argparse.ArgumentParser(description="mixed precision under DDP", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 instead of float16, without a scaler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    prove_unscaling(device, args.seed)
    prove_overflow_is_shared(device)

    data = samples(160 * world_size, args.seed)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=20, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(build(device), [device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, growth_interval=16, enabled=not args.bf16)
    dtype = torch.bfloat16 if args.bf16 else torch.float16

    losses, num_skipped = [], 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            with torch.autocast(device.type, dtype):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scale_before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale_before:
                num_skipped += 1  # an overflow: the step was left out, on all ranks
            else:
                schedule.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / len(loader) / world_size)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, scale {scaler.get_scale():.0f}, {num_skipped} steps skipped so far", flush=True)

    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {"torch.float32"}, f"the parameters are {sorted(dtypes)}, must be ['torch.float32']"
    assert num_skipped < len(loader), f"{num_skipped} steps were skipped, a healthy run skips fewer than {len(loader)}"
    assert args.epochs < 3 or losses[-1] < losses[0], f"the loss must fall: {losses[0]:.4f} in epoch 0, {losses[-1]:.4f} at the end"

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
