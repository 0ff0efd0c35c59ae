# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "N ranks, N times the batch: what the learning rate must become, and the warm-up that makes it hold"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Learning rates on N ranks: the same global batch needs the same rate, N times the batch needs N times the rate and a warm-up.

What it proves: (1) N ranks that share a batch walk the path of one process with the same learning rate: compared with the closed-form
gradient descent of a linear least-squares problem, step by step. (2) The linear scaling rule: one step with N times the batch and N times
the rate lands where N small steps land, while the rate is small. (3) A real net with the scaled rate, warmed up and then annealed by a
schedule that counts *steps*, trains well.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 lr_scaling.py
    python lr_scaling.py                                   a world of one, the same code

What goes wrong in practice: batch size and rate of the single-process recipe are kept, per process: the global batch has grown N times
and the rate has not; the loss is a sum (DDP averages over ranks: the step then grows with the batch of a process, and is N times too
small for the sum of all); the schedule is stepped once for every rank or follows a rank's own progress, so that the rates differ; ranks
with unequal batches, whose means count alike; gradients that are never zeroed, which looks like a rate that grows.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES = 8
BASE_LR, BASE_BATCH = 0.01, 16  # the recipe of one process


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
    """A smooth, not linear, function of eight numbers."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.tanh(x[:, :4].sum(1)) + x[:, 4:].mean(1))


def descend(weight: Tensor, x: Tensor, y: Tensor, lr: float) -> Tensor:
    """One step of gradient descent on the mean squared error of a linear model, written out: what one process would do."""
    return weight - lr * 2.0 / len(y) * x.T @ (x @ weight - y)


def prove_same_batch_same_rate(device: torch.device, seed: int) -> None:
    """The ranks' shares together are the batch; DDP's mean over ranks of their means is the mean over the batch, if shares are equal."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (tensor.double().to(device) for tensor in samples(32 * world_size, seed).tensors)
    linear = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64, device=device)
    model = DistributedDataParallel(linear, [device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR)
    expected = linear.weight.detach()[0].clone()
    for step in range(10):
        loss = F.mse_loss(model(x[rank::world_size]).squeeze(1), y[rank::world_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected = descend(expected, x, y, BASE_LR)
        error = float((linear.weight[0] - expected).detach().abs().max())
        assert error < 1e-12, f"step {step}: {world_size} ranks are {error:.1e} away from one process, allowed 1e-12"


def prove_linear_scaling(seed: int, num_small: int = 4) -> None:
    """Many small steps against one large one; they part by terms of the rate squared, so a tenth of the rate parts a tenth as far."""
    x, y = (tensor.double() for tensor in samples(BASE_BATCH * num_small, seed).tensors)
    apart = []
    for lr in (BASE_LR, BASE_LR / 10):
        small = torch.zeros(FEATURES, dtype=torch.float64)
        for part in range(num_small):
            small = descend(small, x[part::num_small], y[part::num_small], lr)
        large = descend(torch.zeros(FEATURES, dtype=torch.float64), x, y, num_small * lr)
        apart.append(float((small - large).norm() / large.norm()))
    assert apart[1] < 0.2 * apart[0], f"small steps and a large one are {apart[0]:.1e} apart, at a tenth of the rate {apart[1]:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="learning rate against the number of ranks", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    prove_same_batch_same_rate(device, args.seed)
    prove_linear_scaling(args.seed)

    data = samples(160 * world_size, args.seed)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=BASE_BATCH, sampler=sampler, drop_last=True)  # a process; the global batch grows with the ranks
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(net, [device.index] if device.type == "cuda" else None)

    scaled_lr = BASE_LR * world_size
    optimizer = torch.optim.SGD(model.parameters(), lr=scaled_lr, momentum=0.9)
    num_steps, warm_up = args.epochs * len(loader), len(loader)  # the first epoch climbs to the scaled rate, the others come down from it

    def factor(step: int) -> float:
        climbing = (step + 1) / warm_up
        return climbing if step < warm_up else 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    highest_lr = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)).squeeze(1), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            highest_lr = max(highest_lr, schedule.get_last_lr()[0])
            schedule.step()  # once a step, on every rank alike
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        mean_loss = loss_sum.item() / len(loader) / world_size
        if rank == 0:
            print(f"epoch {epoch}: loss {mean_loss:.4f}, lr now {schedule.get_last_lr()[0]:.4f}", flush=True)
    assert highest_lr <= scaled_lr * (1 + 1e-9), f"the rate reached {highest_lr:.6f}, {world_size} x {BASE_LR} is {scaled_lr:.6f}"

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
