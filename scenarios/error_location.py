# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "an index out of range is reported at the right line: on CPU, on CUDA with launch blocking, and before training starts"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Where did it fail? The right line for an index out of range, on a device that runs behind Python's back.

What it proves: a label or token outside its range is found before training, by one comparison, with its place in the data; on the CPU the
traceback names the loss; on an asynchronous device it names whatever line happened to wait for the device, and the right one only with
CUDA_LAUNCH_BLOCKING=1. With a GPU this is done for real, in child processes, because a device-side assert ruins the context of the process
that meets it. Without one a stand-in queue of kernels shows the same, and the output says that it was a stand-in.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 error_location.py
    python error_location.py
    CUDA_LAUNCH_BLOCKING=1 python train.py                 what to do with a script of your own that dies of a device-side assert

What goes wrong in practice: labels 1..10 for ten classes, -1 or 255 for "unknown" without `ignore_index`, a tokenizer larger than the
embedding. CUDA reports "device-side assert triggered" at a later line, often in another rank's log: there the collective fails, because
its peer is gone ("connection closed by peer"), and this innocent rank is what the launcher shows. And an `except: continue` around a bad
batch keeps one rank alive and out of step: from then on every gradient meets one of another batch.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_CLASSES, VOCABULARY = 4, 40


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


def line_of(mark: str) -> int:
    """The line of this file that ends in the comment `# <mark>`."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# {mark}"))


def failing_line(function: Callable[..., object], *args: object) -> int:
    """Call, expect a failure, and return the line of `function` at which it surfaced."""
    try:
        function(*args)
    except (IndexError, RuntimeError) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not function.__code__:
            trace = trace.tb_next
        return trace.tb_lineno if trace is not None else 0
    return 0


class StandInQueue:
    """A device in eight lines: launch() returns at once, the work is done when somebody waits, and errors surface there."""

    def __init__(self, blocking: bool) -> None:
        self.blocking, self.kernels = blocking, list[Callable[[], object]]()

    def launch(self, kernel: Callable[[], object]) -> None:
        self.kernels.append(kernel)
        if self.blocking:  # CUDA_LAUNCH_BLOCKING=1
            self.synchronize()

    def synchronize(self) -> None:
        while self.kernels:
            self.kernels.pop(0)()


def step_on_queue(queue: StandInQueue, logits: Tensor, labels: Tensor) -> None:
    queue.launch(lambda: F.cross_entropy(logits, labels))  # queued: the loss
    queue.launch(lambda: logits * 2)
    queue.synchronize()  # queued: the wait


def step_on_cpu(logits: Tensor, labels: Tensor) -> None:
    F.cross_entropy(logits, labels)  # cpu: the loss
    logits.sum().item()


def step_on_cuda() -> None:
    """Run by a child process, see crash_on_cuda."""
    logits, labels = torch.zeros(4, NUM_CLASSES, device="cuda"), torch.tensor([0, 1, -1, 2], device="cuda")
    F.cross_entropy(logits, labels)  # cuda: the loss
    logits.sum().item()  # cuda: the wait


def crash_on_cuda(blocking: bool) -> int:
    """The line that a traceback shows. -I: the child is no rank of this job, and takes nothing from its environment."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment["CUDA_LAUNCH_BLOCKING"] = str(int(blocking))
    command = [sys.executable, "-I", __file__, "--crash"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    shown = [line for line in child.stderr.splitlines() if line.strip().startswith("File ") and line.endswith("in step_on_cuda")]
    return int(shown[-1].split(", line ")[1].split(",")[0]) if shown else 0


def check_lines(device: torch.device) -> list[str]:
    logits, bad = torch.zeros(4, NUM_CLASSES), torch.tensor([0, 1, -1, 2])
    found = failing_line(step_on_cpu, logits, bad)
    assert found == line_of("cpu: the loss"), f"on the CPU the error must surface at line {line_of('cpu: the loss')}, it did at {found}"
    lines = [f"CPU: the error surfaces at the loss, line {found}"]
    if device.type == "cuda":
        name, kind, late, right = "CUDA", "cuda", crash_on_cuda(blocking=False), crash_on_cuda(blocking=True)
    else:
        name, kind = "stand-in queue, not a GPU", "queued"
        late, right = (failing_line(step_on_queue, StandInQueue(blocking), logits, bad) for blocking in (False, True))
    wait, loss = line_of(f"{kind}: the wait"), line_of(f"{kind}: the loss")
    assert late == wait, f"{name}: without blocking the error surfaces where the device is waited for, line {wait}, got {late}"
    assert right == loss, f"{name}: with blocking it must surface at the loss, line {loss}, got {right}"
    return [*lines, f"{name}: it surfaces at line {late}, with launch blocking at the loss, line {right}"]


def check_range(name: str, values: Tensor, limit: int) -> None:
    """One comparison of the whole column, before any training; on the CPU, where an error is cheap."""
    bad = ((values < 0) | (values >= limit)).nonzero()
    assert len(bad) == 0, f"{name}: {len(bad)} of {values.numel()} lie outside 0..{limit - 1}, the first at {bad[0].tolist()}"


def sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, NUM_CLASSES, (count,), generator=draw)
    own_words = torch.randint(0, 10, (count, 5), generator=draw) + 10 * labels.unsqueeze(1)
    return torch.cat([own_words, torch.randint(0, VOCABULARY, (count, 7), generator=draw)], dim=1), labels


def main() -> None:
    parser = argparse.ArgumentParser(description="the right line for an index out of range", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crash", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.crash:
        step_on_cuda()
        return
    device = start(args.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = check_lines(device) if rank == 0 else []

    tokens, labels = sentences(512, seed=1)
    check_range("labels", labels, NUM_CLASSES)
    check_range("tokens", tokens, VOCABULARY)

    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.EmbeddingBag(VOCABULARY, 24), nn.ReLU(), nn.Linear(24, NUM_CLASSES)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset = TensorDataset(tokens, labels)
    sampler = DistributedSampler(dataset, world, rank, seed=args.seed)
    loader = DataLoader(dataset, batch_size=32 // world, sampler=sampler, drop_last=True)
    curve = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
    losses = torch.stack(curve)
    dist.all_reduce(losses)
    losses /= world
    first, last = losses[:8].mean().item(), losses[-8:].mean().item()
    assert last < 0.8 * first, f"loss must fall by 20 %: first eight steps {first:.4f}, last eight {last:.4f}"
    if rank == 0:
        print(*lines, f"loss {first:.4f} -> {last:.4f} in {len(losses)} steps", sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
