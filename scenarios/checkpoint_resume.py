# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "stop, save, load, go on: bit-identical to the run that was never interrupted"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Checkpoint and resume: the continued run must be the run that was never interrupted; with two ranks bit by bit, with more to rounding.

What it proves: with model, optimizer, schedule, scaler, place in the data and each rank's random state in the file, a job that stops
after half of its epochs and goes on in new objects gives the very losses of the job that ran through. Rank 0 writes, to a temporary name
that is then renamed (a crash leaves the last good file); a barrier follows before anybody reads; every rank reads onto its own device.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 checkpoint_resume.py
    python checkpoint_resume.py                            a world of one, the same code
The file goes to a temporary folder of rank 0 and is removed at the end; `--out` names one that all nodes see, and keeps it.

What goes wrong in practice: all ranks write the same path at once; a rank reads before the writer is done; only rank 0 loads; only the
weights are loaded (Adam's moments, the schedule and the scale start over: the loss jumps); the epoch counts from zero again, so that the
first epochs' shuffles are repeated; rank 0's random state is given to all; a file that holds whole pickled objects, which weights_only
refuses.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES, BATCH = 12, 4, 64


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


class Job:
    """All that a run consists of. Whatever has a state and is missing in `state_dict` starts over after a resume."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.data = samples(320, seed)
        self.sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(self.data, shuffle=True, seed=seed, drop_last=True)
        self.loader = DataLoader(self.data, BATCH // self.world_size, sampler=self.sampler, drop_last=True)
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(FEATURES, 48), nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, CLASSES)).to(device)
        self.model = DistributedDataParallel(self.net, [device.index] if device.type == "cuda" else None)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=8)
        self.epoch = 0
        torch.manual_seed(1000 * seed + self.rank)  # equal weights, but dropout masks of their own

    def run(self, until: int) -> list[float]:
        """Train up to an epoch; the losses of this rank's steps, which a bit-identical continuation must repeat."""
        losses = []
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                loss = F.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.schedule.step()
                losses.append(loss.item())
            self.epoch += 1
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and containers only, so that `weights_only` can load it. Collective: the random states of all ranks go in."""
        state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        random_states = [torch.empty_like(state, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(random_states, state.to(self.device))
        return {
            "model": self.net.state_dict(),  # the unwrapped module's keys: they load with and without DDP
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "random_states": random_states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch = state["epoch"]
        mine = state["random_states"][self.rank].cpu()
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(mine, self.device)
        else:
            torch.set_rng_state(mine)


def save(job: Job, path: Path) -> None:
    """For all ranks to call: the state is gathered from all, one rank writes, nobody goes on before the file is whole."""
    state = job.state_dict()
    if job.rank == 0:
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="checkpoint and resume", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, help="folder for the checkpoint; default: a temporary one, removed at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    temporary = tempfile.TemporaryDirectory(prefix="checkpoint_resume_") if rank == 0 and args.out is None else None
    box = [temporary.name if temporary else str(args.out)]
    dist.broadcast_object_list(box, src=0)  # rank 0 chose the name
    path = Path(box[0]) / "checkpoint.pt"
    path.parent.mkdir(parents=True, exist_ok=True)

    first = Job(args.seed, device)
    losses = first.run(until=args.epochs // 2)
    save(first, path)
    straight = first.run(until=args.epochs)  # as if nothing had happened

    second = Job(args.seed, device)  # what a new process would build
    second.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    resumed = second.run(until=args.epochs)
    # A sum over more than two ranks has several orders, and DDP puts its buckets into another one after each wrapper's first step.
    rounding = 0.0 if world_size <= 2 else 1e-4
    differing = [step for step, (a, b) in enumerate(zip(straight, resumed, strict=True)) if not abs(a - b) <= rounding * abs(a)]
    assert not differing, f"step {differing[0]}: loss {resumed[differing[0]]!r} after a resume, {straight[differing[0]]!r} without one"

    means = torch.tensor([sum(part) / max(1, len(part)) for part in (losses, resumed)], device=device)
    dist.all_reduce(means)
    before, after = (means / world_size).tolist()
    assert args.epochs < 4 or after < before, f"the loss must fall: mean {before:.4f} before the checkpoint, {after:.4f} after it"
    if rank == 0:
        print(f"{len(resumed)} steps as without a break; mean loss {before:.4f} before the checkpoint, {after:.4f} after it", flush=True)
    dist.barrier()  # no rank is still reading
    if temporary:
        temporary.cleanup()

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
